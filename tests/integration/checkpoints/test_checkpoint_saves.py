"""Saves of a sharded run: which step is consistent, and what a group goes back to."""

import hashlib

import pytest

from atoll.errors import (
    Conflict,
    ProtocolError,
    StaleGroup,
    WrongRound,
)
from atoll.layout import byte_view
from atoll.protocol.sharded import SaveReport
from tests.hand_ranks import (
    Sea,
    checkpoint,
    initial,
    restore_of,
)


def test_step_is_consistent_once_all_have_reported_it(trio):
    a, b, c = trio

    assert [a.save(3).consistent, b.save(3).consistent] == [0, 0]
    assert c.save(3).consistent == 3
    assert a.save(6).consistent == 3


def test_repeated_report_changes_nothing_and_another_hash_is_a_conflict(sea, trio):
    a, *_ = trio
    a.save(3)
    before = sea.state_hash()

    a.save(3)
    assert sea.state_hash() == before
    a.label = b"other"
    with pytest.raises(Conflict, match=r"rank 0 of group 3 saved step 3 as .* first one stands"):
        a.save(3)

    assert sea.state_hash() == before


def test_save_whose_predecessor_disagrees_is_not_consistent(trio):
    a, b, c = trio
    a.save(3)
    b.label = b"other"
    b.save(3)

    assert c.save(3).consistent == 0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"step": 4}, WrongRound, "step=4 of the save is none that group 3 saves"),
        ({"step": 15}, WrongRound, "step=15 of the save is none"),
        ({"step": 0}, WrongRound, "step=0 of the save is none"),
        ({"rank": 1}, ProtocolError, "rank=1 of the save is not the sender's in group 3"),
        ({"group": 2}, StaleGroup, "group=2 is over or not begun, the present one is 3"),
    ],
)
def test_save_that_no_rank_makes_is_refused_and_changes_nothing(sea, trio, changes, error, says):
    a, *_ = trio
    before = sea.state_hash()
    save = a.held(3).model_copy(update=changes)

    with pytest.raises(error, match=says):
        sea.coordinator.saved(SaveReport(identity=a.identity, save=save))

    assert sea.state_hash() == before


def test_survivors_of_one_go_back_to_the_newest_consistent_step(sea, trio):
    a, b, c = trio
    for rank in trio:
        rank.save(3)
    a.save(6)  # the others had not
    b.leave()

    found = restore_of(a, c)

    assert (found.source, found.step, found.size) == ("save", 3, 3)
    assert found.holders == ((0,), (1,), (0, 1))  # b's is its successor's, c's also a's
    assert found.tokens == 3 * 5 * 4


def test_two_neighbours_gone_go_back_to_the_checkpoint(sea):
    a, b, c, d = sea.formed(*sea.ranks("a", "b", "c", "d"))
    ranks = [a, b, c, d]
    sea.trained(ranks, 1)
    sea.settle()
    for rank in ranks:
        rank.save(9)
    b.leave()
    c.leave()

    found = restore_of(a, d)

    assert (found.source, found.step, found.size) == ("checkpoint", 6, 4)
    assert found.parts == checkpoint(sea).blobs
    assert found.tokens == 6 * 5 * 4


def test_held_shard_with_another_hash_is_not_gone_back_to(sea, trio):
    for rank in trio:
        rank.save(3)
    trio[2].leave()
    [held] = trio[0].disk
    trio[0].disk = [held.model_copy(update={"predecessor": "f" * 64})]  # of the one that is gone

    [reply] = {rank.formed.restore for rank in sea.formed(*trio[:2])}

    assert reply.source == "initial"


def test_saves_that_a_group_went_back_behind_are_never_gone_back_to(sea):
    """Those who hold them come back after others trained the same steps to another checkpoint."""
    first = sea.formed(*sea.ranks("a", "b", "c", "d"))
    sea.trained(first, 1, upload=False)
    for rank in first:
        rank.leave()
    second = sea.formed(*sea.ranks("e", "f", "g"))
    for rank in second:
        rank.label = b"another history"
    sea.trained(second, 1)
    sea.settle()
    for rank in second[:2]:  # nobody else holds the shard of the first
        rank.leave()

    [reply] = {r.formed.restore for r in sea.formed(*(r.join() for r in first), second[2])}

    assert (reply.source, reply.step, reply.size) == ("checkpoint", 6, 3)


def test_without_anything_saved_all_begin_with_the_initial_weights(sea, trio):
    a, b, c = trio
    a.save(3)
    c.leave()

    found = restore_of(a, b)

    assert (found.source, found.step, found.tokens) == ("initial", 0, 0)
    assert found.parts == (sea.coordinator.run.initial_sha256,)
    reader = sea.coordinator.fetch(a.identity, found.parts[0], found.offset, sea.layout.nbytes)
    with reader:
        stored = reader.read(found.offset, sea.layout.nbytes)
    assert hashlib.sha256(stored).hexdigest() == hashlib.sha256(initial_bytes(sea)).hexdigest()


def initial_bytes(sea: Sea) -> bytes:
    return bytes(byte_view(initial(sea.layout)))


def test_save_is_forgotten_by_no_restart(sea, trio):
    a, b, c = trio
    a.save(3)
    sea.restart()
    b.save(3)
    sea.restart()

    assert c.save(3).consistent == 3
    c.leave()
    sea.restart()
    assert restore_of(a, b).step == 3


def test_checkpoint_that_all_hold_on_disk_is_read_rank_to_rank(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    c.leave()

    found = restore_of(a, b)

    assert (found.source, found.step) == ("save", 6)
