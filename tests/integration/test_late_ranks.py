"""What ranks tell of those that were late: checked, agreed on, and their rows open again."""

import pytest

from atoll.errors import Conflict, ProtocolError
from atoll.ledger.records import LeaseState
from atoll.ledger.sqlite import truncation
from atoll.ledger.tables.leases import LeaseTable
from tests.hand_ranks import Sea
from tests.ledgers import alone

QUORUM = {"sharded.commit": "quorum", "sharded.exchange": "direct"}
# Steps 1 to 6 of 5 rows; of 3 ranks they have 1, 2 and 2.
LATE = ((2, 1, 3), (2, 2, 3), (6, 0, 3))
ROWS = 4 + 1  # positions 6 to 10, and 25


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path, QUORUM)
    yield made
    made.close()


@pytest.fixture
def trio(sea):
    found = sea.formed(*sea.ranks("a", "b", "c"))
    sea.trained(found, 1, upload=False)
    for rank in found:
        rank.upload(1)
    return found


def spans(sea, number, state):
    held = alone(sea.ledger).leases.of_round(number)
    return [(lease.start, lease.stop) for lease in held if lease.state is state]


def test_rows_of_late_ranks_are_open_again_with_the_checkpoint(sea, trio):
    for rank in trio:
        rank.tell_part(1, late=LATE)
    sea.settle()

    [checkpoint] = alone(sea.ledger).checkpoints.all()
    assert checkpoint.late == LATE
    assert checkpoint.rows == 30 - ROWS
    assert spans(sea, 1, LeaseState.DONE) == [(0, 6), (10, 25), (26, 30)]
    # The next plan has taken them, with the next epoch of their leases, before fresh ones.
    assert spans(sea, 1, LeaseState.TAKEN) == [(6, 10), (25, 26)]
    third = alone(sea.ledger).leases.of_round(3)
    assert [(x.start, x.stop, x.lease_epoch) for x in third] == [
        (6, 10, 2),
        (25, 26, 2),
        (60, 85, 1),
    ]
    assert sea.audit().clean


def test_restart_between_parts_keeps_what_they_said(sea, trio):
    a, b, c = trio
    a.tell_part(1, late=LATE)
    b.tell_part(1, late=LATE)
    sea.restart()
    c.tell_part(1, late=LATE)
    sea.settle()

    assert spans(sea, 1, LeaseState.DONE) == [(0, 6), (10, 25), (26, 30)]
    assert sea.audit().clean


def test_crash_inside_the_commit_leaves_all_leases_as_they_were(sea, trio, monkeypatch):
    for rank in trio:
        rank.tell_part(1, late=LATE)
    before = sea.state_hash()

    def dies(*_):
        raise RuntimeError("here")

    with monkeypatch.context() as patch:
        patch.setattr(LeaseTable, "finish", dies)
        with pytest.raises(RuntimeError):
            sea.coordinator.checkpoints.commit_due()

    assert sea.state_hash() == before
    assert sea.coordinator.checkpoints.commit_due()
    assert sea.audit().clean


@pytest.mark.parametrize(
    ("late", "says"),
    [
        (((7, 0, 3),), r"late=\(7, 0, 3\) is no rank of a step of round 1, steps 1 to 6"),
        (((0, 0, 3),), r"late=\(0, 0, 3\) is no rank of a step"),
        (((2, 3, 3),), r"late=\(2, 3, 3\) is no rank of a step"),
        (((2, 1, 4),), r"late=\(2, 1, 4\) is no rank of a step .* in group 3 of 3"),
        (((2, 1, 3), (2, 1, 3)), "is not in the order of steps and ranks, each once"),
        (((3, 1, 3), (2, 1, 3)), "is not in the order of steps and ranks, each once"),
    ],
)
def test_lateness_that_cannot_have_been_is_refused_and_changes_nothing(sea, trio, late, says):
    before = sea.state_hash()

    with pytest.raises(ProtocolError, match=says):
        trio[0].tell_part(1, late=late)

    assert sea.state_hash() == before


@pytest.mark.parametrize("other", [(), LATE[:1], ((2, 0, 3),)], ids=str)
def test_rank_that_says_otherwise_is_refused_and_nothing_is_committed(sea, trio, other):
    a, b, _ = trio
    a.tell_part(1, late=LATE)
    before = sea.state_hash()

    with pytest.raises(Conflict, match=r"rank 1 of group 3 says late=.* rank 0 says \[\(2, 1, 3\)"):
        b.tell_part(1, late=other)

    assert sea.state_hash() == before
    assert not sea.coordinator.checkpoints.is_due()


def test_strict_run_takes_no_late_ranks(tmp_path):
    sea = Sea(tmp_path)
    ranks = sea.formed(*sea.ranks("a", "b"))
    sea.trained(ranks, 1, upload=False)
    ranks[0].upload(1)

    with pytest.raises(ProtocolError, match=r"in a run with sharded\.commit='strict'"):
        ranks[0].tell_part(1, late=((2, 1, 2),))

    sea.close()


def test_cut_run_keeps_its_balance_when_rows_were_late_twice(tmp_path):
    """Rows of round 1 come again in round 3, late again; without round 3 they are open once."""
    sea = Sea(tmp_path, QUORUM)
    ranks = sea.formed(*sea.ranks("a", "b", "c"))
    for number, late in ((1, ((2, 1, 3), (2, 2, 3))), (2, ()), (3, ((13, 0, 3),))):
        sea.trained(ranks, number, upload=False)
        for rank in ranks:
            rank.upload(number)
            rank.tell_part(number, late=late)
        sea.settle()
        for rank in ranks:
            rank.boundary(number)
    assert sea.audit().clean

    with sea.ledger.writing() as t:
        truncation.truncate(t, last_round=2)

    found = sea.audit(with_replay=False)
    sea.close()
    assert found.clean, found.problems
