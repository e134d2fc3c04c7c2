"""A ledger that is taken back keeps nothing that a dropped round was to fold."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import DatasetRecord, LeaseRecord, LeaseState, QueueRecord, RoundPlan
from atoll.ledger.sqlite import truncation
from tests.ledgers import MANIFEST, PUBLISHED, RUN, alone, contribution

WORDS = DatasetRecord("d" * 16, "words", 100, 1)
QUEUE = QueueRecord(WORDS.dataset_id, 7, 0, 100, units=25)  # of four rows


def plan(number: int) -> RoundPlan:
    """Four rows for each of `a` and `b`."""
    first = 8 * (number - 1)
    leases = [
        LeaseRecord(
            number, name, start, start + 4, dataset_id="d" * 16, shuffle_seed=7, unit=start // 4
        )
        for name, start in (("a", first), ("b", first + 4))
    ]
    return RoundPlan(number, MANIFEST.sha256, first + 8, tuple(leases), queues=(QUEUE,))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Round 1 published with `a` alone; what `b` made for it is to be folded by round 2, open."""
    opened = engines.open_ledger(tmp_path / "ledger.sqlite")
    tables = alone(opened)
    tables.run.create(RUN, MANIFEST)
    tables.datasets.add([WORDS])
    for name in "ab":
        tables.members.register(name, "key", wall=1.0)
    tables.rounds.begin([plan(1), plan(2)])
    tables.contributions.accept(contribution("a", round=1))
    tables.contributions.accept(contribution("b", round=1, applied=2))
    tables.rounds.freeze(1, plan(3), ended=())
    tables.rounds.publish(1, PUBLISHED, opens=[3])
    yield opened
    opened.close()


def leases(ledger: Ledger) -> dict[tuple[int, str], LeaseState]:
    return {
        (lease.round, lease.worker_id): lease.state
        for record in alone(ledger).rounds.all()
        for lease in alone(ledger).leases.of_round(record.round)
    }


def test_contribution_that_a_dropped_round_was_to_fold_goes_and_its_rows_reopen(ledger: Ledger):
    with ledger.writing() as t:
        truncation.truncate(t, last_round=1)

    assert [c.worker_id for c in alone(ledger).contributions.of_round(1)] == ["a"]
    assert alone(ledger).contributions.get(1, "b") is None
    assert leases(ledger) == {(1, "a"): LeaseState.DONE, (1, "b"): LeaseState.REOPENED}
    [queue] = alone(ledger).queues.all().sound
    assert (queue.issued[0], queue.done[0]) == (0b11, 0b01)
    assert ledger.damage() == []


def test_what_a_kept_round_folds_stays(ledger: Ledger):
    """The control: only what is folded later goes."""
    alone(ledger).rounds.freeze(2, None, ended=())
    alone(ledger).rounds.publish(2, PUBLISHED)

    with ledger.writing() as t:
        truncation.truncate(t, last_round=2)

    assert [(c.round, c.worker_id) for c in alone(ledger).contributions.of_round(2)] == [(1, "b")]
    assert leases(ledger)[1, "b"] is LeaseState.DONE


def test_rows_of_a_dropped_round_below_the_cursor_are_open_again(ledger: Ledger):
    """A round that was filled up late has rows after those of rounds planned before that."""
    tables = alone(ledger)
    tables.members.register("c", "key", wall=1.0)
    late = LeaseRecord(2, "c", 24, 28, dataset_id="d" * 16, shuffle_seed=7, unit=6)
    tables.rounds.extend(RoundPlan(2, MANIFEST.sha256, 28, (late,), queues=(QUEUE,)))
    tables.contributions.accept(contribution("c", round=2))
    tables.rounds.freeze(2, None, ended=[(2, "a"), (2, "b")])
    tables.rounds.publish(2, PUBLISHED)

    with ledger.writing() as t:
        truncation.truncate(t, last_round=2)

    kept = [lease for number in (1, 2) for lease in tables.leases.of_round(number)]
    rows = {row for lease in kept for row in range(lease.start, lease.stop)}
    [newest] = tables.rounds.all(first=2)
    assert set(range(newest.cursor)) == rows
