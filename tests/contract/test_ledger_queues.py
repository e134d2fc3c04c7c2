"""Datasets, queues and leases of every ledger: SQLite in a file, and PostgreSQL."""

from dataclasses import replace

import pytest
from sqlalchemy import insert, update

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import DatasetRecord, LeaseRecord, LeaseState, QueueRecord, RoundPlan
from atoll.ledger.tables import schema
from tests import ledgers
from tests.ledgers import MANIFEST, RUN, alone, contribution

WORDS = DatasetRecord("a" * 16, "words", 20, 1)
FLOOD = DatasetRecord("b" * 16, "flood", 0, 1)
QUEUE = QueueRecord(WORDS.dataset_id, 7, 0, 20, units=5)  # of four rows
STREAM = QueueRecord(FLOOD.dataset_id, 7, 0, 0, units=0, unit_rows=8)


def lease(worker_id: str, start: int, stop: int, **changes: object) -> LeaseRecord:
    made = LeaseRecord(
        1, worker_id, start, stop, dataset_id=WORDS.dataset_id, shuffle_seed=7, unit=start // 4
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def plan(*leases: LeaseRecord, queues: tuple[QueueRecord, ...] = (QUEUE,), number: int = 1):
    return RoundPlan(number, MANIFEST.sha256, 16 * number, leases, queues=queues)


@pytest.fixture
def started(ledger: Ledger) -> Ledger:
    """Round 1 open: `a` has rows 0 to 6 and `b` rows 6 to 12, of units of four rows."""
    alone(ledger).run.create(RUN, MANIFEST)
    alone(ledger).datasets.add([WORDS, FLOOD])
    for name in "abc":
        alone(ledger).members.register(name, f"key {name}", wall=5.0)
    ledgers.begin(ledger, plan(lease("a", 0, 6), lease("b", 6, 12)))
    return ledger


def bits(bitmap: bytes, count: int) -> str:
    number = int.from_bytes(bitmap, "little")
    return "".join("x" if number >> unit & 1 else "." for unit in range(count))


def shown(ledger: Ledger) -> tuple[str, str]:
    """The one sound queue: units issued, units done."""
    [queue] = alone(ledger).queues.all().sound
    return bits(queue.issued, queue.units), bits(queue.done, queue.units)


# Datasets


def test_datasets_come_back_by_id(started: Ledger):
    assert alone(started).datasets.all() == [WORDS, FLOOD]


def test_dataset_known_before_changes_nothing(started: Ledger):
    before = started.state_hash()

    alone(started).datasets.add([WORDS])

    assert started.state_hash() == before


def test_dataset_with_another_length_is_refused_by_both(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.DatasetMismatch, match=r"'a{16}' \(words\) has 21 rows .* 20 in the"):
        alone(started).datasets.add(
            [replace(FLOOD, dataset_id="c" * 16), replace(WORDS, length=21)]
        )

    assert started.state_hash() == before


# Queues


def test_units_that_leases_touch_are_issued(started: Ledger):
    assert shown(started) == ("xxx..", ".....")


def test_unit_is_done_once_all_its_rows_are(started: Ledger):
    """`a` has all of unit 0 and half of unit 1, which `b` completes."""
    alone(started).contributions.accept(contribution("a"))
    first = shown(started)

    alone(started).contributions.accept(contribution("b"))

    assert (first, shown(started)) == (("xxx..", "x...."), ("xxx..", "xxx.."))


def test_refused_contribution_leaves_the_bitmaps(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.LeaseLost):
        alone(started).contributions.accept(contribution("c"))

    assert started.state_hash() == before


def test_repeated_contribution_leaves_the_bitmaps(started: Ledger):
    alone(started).contributions.accept(contribution("a"))
    before = started.state_hash()

    alone(started).contributions.accept(contribution("a"))

    assert started.state_hash() == before


def test_queue_that_exists_keeps_its_cut(started: Ledger):
    ledgers.freeze(
        started,
        1,
        plan(replace(lease("a", 12, 16), round=2), queues=(replace(QUEUE, units=2),), number=2),
    )

    [queue] = alone(started).queues.all().sound
    assert (queue.units, shown(started)) == (5, ("xxxx.", "....."))


def test_stream_grows_with_what_is_issued_of_it(started: Ledger):
    long = LeaseRecord(2, "a", 0, 20, dataset_id=FLOOD.dataset_id, shuffle_seed=7)

    ledgers.freeze(started, 1, plan(long, queues=(STREAM,), number=2))

    [_, stream] = alone(started).queues.all().sound
    assert (stream.length, stream.units, bits(stream.issued, 3)) == (0, 3, "xxx")
    assert len(stream.done) == 1


def test_cursors_are_where_the_leases_of_each_dataset_end(started: Ledger):
    assert alone(started).datasets.cursors() == {WORDS.dataset_id: 12}


def test_rows_are_counted_by_queue_worker_and_state(started: Ledger):
    alone(started).contributions.accept(contribution("a"))

    found = [
        (c.dataset_id, c.epoch, c.worker_id, c.state, c.rows)
        for c in alone(started).leases.counts()
    ]

    assert found == [
        (WORDS.dataset_id, 0, "a", LeaseState.DONE, 6),
        (WORDS.dataset_id, 0, "b", LeaseState.LEASED, 6),
    ]


# Leases end


def test_freeze_without_reissue_gives_lost_rows_up(started: Ledger):
    alone(started).contributions.accept(contribution("a"))

    ledgers.freeze(started, 1, None, reissue=False)

    assert [le.state for le in alone(started).leases.of_round(1)] == [
        LeaseState.DONE,
        LeaseState.GIVEN_UP,
    ]
    assert alone(started).leases.reopened() == []


def test_expire_ends_the_leases_of_one_worker(started: Ledger):
    ended = alone(started).rounds.expire(1, ["b"])

    assert (ended, [le.state for le in alone(started).leases.of_round(1)]) == (
        1,
        [LeaseState.LEASED, LeaseState.REOPENED],
    )


def test_expire_leaves_what_is_done(started: Ledger):
    alone(started).contributions.accept(contribution("a"))

    assert alone(started).rounds.expire(1, ["a", "b"], reissue=False) == 1

    assert [le.state for le in alone(started).leases.of_round(1)] == [
        LeaseState.DONE,
        LeaseState.GIVEN_UP,
    ]


def test_expire_is_refused_for_a_round_that_is_not_open_yet(started: Ledger):
    ledgers.freeze(started, 1, ledgers.plan(2, [ledgers.lease(2, "b", 40, 48)]))
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match="round 2 is planned; leases end only in one"):
        alone(started).rounds.expire(2, ["b"])

    assert started.state_hash() == before


def test_contribution_after_its_lease_ended_is_lost(started: Ledger):
    alone(started).rounds.expire(1, ["b"])
    before = started.state_hash()

    with pytest.raises(errors.LeaseLost):
        alone(started).contributions.accept(contribution("b"))

    assert started.state_hash() == before


def test_lease_goes_over_to_the_next_life_of_its_worker(started: Ledger):
    alone(started).members.register("a", "key a", wall=6.0)

    [mine] = [le for le in alone(started).leases.of_round(1) if le.worker_id == "a"]
    assert (mine.incarnation, mine.lease_epoch, mine.state) == (2, 2, LeaseState.LEASED)
    assert alone(started).contributions.accept(contribution("a", incarnation=2)).incarnation == 2


def test_lease_that_is_done_stays_with_the_life_that_did_it(started: Ledger):
    alone(started).contributions.accept(contribution("a"))

    alone(started).members.register("a", "key a", wall=6.0)

    [mine] = [le for le in alone(started).leases.of_round(1) if le.worker_id == "a"]
    assert (mine.incarnation, mine.lease_epoch, mine.state) == (1, 1, LeaseState.DONE)


def test_new_lease_belongs_to_the_present_life_whatever_the_plan_says(started: Ledger):
    alone(started).members.register("c", "key c", wall=6.0)

    alone(started).rounds.extend(plan(lease("c", 12, 16, incarnation=1)))

    [mine] = [le for le in alone(started).leases.of_round(1) if le.worker_id == "c"]
    assert mine.incarnation == 2


# Damage


def damage(subject: Ledger, **changes: object) -> None:
    with subject.writing() as t:
        statement = update(schema.queues).where(schema.queues.c.name == QUEUE.name)
        assert t.connection.change(statement.values(**changes)) == 1


DAMAGES = {
    "unreadable key": ({"name": "no key"}, "'no key'", "its key is not dataset_id/shuffle_seed"),
    "missing field": ({"issued": None}, QUEUE.name, "its field 'issued' is missing"),
    "bitmap length": ({"done": bytes(2)}, QUEUE.name, "'done' of 2 bytes is not one of 5 units"),
    "bit past the end": ({"done": b"\x80"}, QUEUE.name, "'done' of 1 bytes is not one of 5"),
    "other length": ({"length": 21}, QUEUE.name, "length=21 is not its dataset's 20"),
    "too many units": ({"units": 21}, QUEUE.name, "units=21 do not cut an epoch of 20 rows"),
    "unknown dataset": ({"name": f"{'d' * 16}/7/0"}, "d" * 16, "its dataset is not in the ledger"),
}


@pytest.mark.parametrize(("changes", "name", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entry_is_refused_by_name_and_the_rest_serves_on(
    started: Ledger, changes: dict[str, object], name: str, reason: str
):
    ledgers.freeze(
        started,
        1,
        plan(
            replace(lease("a", 20, 24, epoch=1), round=2),
            queues=(replace(QUEUE, epoch=1),),
            number=2,
        ),
    )
    damage(started, **changes)

    found = alone(started).queues.all()

    assert [queue.epoch for queue in found.sound] == [1]
    [entry] = found.damaged
    assert name in repr(entry.name) + entry.reason
    assert reason in entry.reason


def test_damaged_entry_is_left_as_it_is_and_contributions_go_on(started: Ledger):
    damage(started, done=bytes(2))

    alone(started).contributions.accept(contribution("a"))
    ledgers.freeze(started, 1, plan(replace(lease("a", 12, 16), round=2), number=2))

    assert [entry.name for entry in alone(started).queues.all().damaged] == [QUEUE.name]
    assert alone(started).datasets.cursors() == {WORDS.dataset_id: 16}


def test_queue_of_another_dataset_harms_nothing(started: Ledger):
    """A changed dataset is a new id; what was there of the old one stays."""
    old = DatasetRecord("0" * 16, "old", 6, 1)
    alone(started).datasets.add([old])
    with started.writing() as t:
        entry = {"length": 6, "units": 6, "unit_rows": 0, "issued": b"\x3f", "done": b"\x3f"}
        t.connection.change(insert(schema.queues), {"name": f"{old.dataset_id}/7/0", **entry})

    alone(started).contributions.accept(contribution("a"))

    stale, mine = alone(started).queues.all().sound
    assert (stale.done, mine.done) == (b"\x3f", b"\x01")
