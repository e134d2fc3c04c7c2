"""Ends of rounds of a sharded run: who goes on, waits, regroups or stops."""

import pytest

from atoll.errors import (
    WrongRound,
)
from tests.hand_ranks import (
    ROUND_STEPS,
    Sea,
    restore_of,
)


def test_boundary_goes_on_while_the_upload_is_under_way(sea, trio):
    sea.trained(trio, 1, upload=False)

    replies = [rank.boundary(1) for rank in trio]

    assert {r.action for r in replies} == {"go"}
    assert replies[0].interval is not None
    assert (replies[0].interval.round, replies[0].interval.first) == (2, 7)


def test_next_boundary_waits_until_the_round_before_is_committed(sea, trio):
    sea.trained(trio, 1)
    assert trio[0].boundary(1).action == "go"
    before = trio[0].boundary(2)

    assert sea.settle() == 1
    after = trio[0].boundary(2)

    assert before.action == "wait"
    assert (after.action, after.interval.round) == ("go", 3)


def test_newcomer_that_waits_at_the_first_asking_makes_all_regroup_after_the_commit(sea, trio):
    [d] = sea.ranks("d")
    d.ask()
    sea.trained(trio, 1, upload=False)
    first = trio[0].boundary(1)
    for rank in trio:
        rank.hand_in(1)
    assert sea.settle() == 1

    assert first.action == "wait"
    assert [rank.boundary(1).action for rank in trio] == ["regroup"] * 3
    assert trio[0].watch().group == 0
    found = restore_of(*trio, d)
    assert (found.step, found.source) == (6, "save")
    assert sea.group.step == 6


def test_newcomer_that_comes_after_the_first_asking_waits_for_the_next_boundary(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1, upload=False)
    first = a.boundary(1)
    [d] = sea.ranks("d")
    d.ask()

    assert first.action == "go"
    assert [r.boundary(1).action for r in (b, c)] == ["go", "go"]


@pytest.mark.parametrize("newcomer_first", [True, False])
def test_what_the_first_was_told_at_a_boundary_all_are_told_after_a_restart(
    sea, trio, newcomer_first
):
    """The window between two ranks' asking: whoever waits then must not split the group."""
    a, b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    if newcomer_first:
        [d] = sea.ranks("d")
        d.ask()
    told = a.boundary(1).action
    sea.restart()
    if not newcomer_first:
        [d] = sea.ranks("d")
        d.ask()

    assert told == ("regroup" if newcomer_first else "go")
    assert [r.boundary(1).action for r in (b, c)] == [told, told]


def test_group_that_is_over_is_told_to_regroup(sea, trio):
    a, _b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    c.leave()

    assert a.boundary(1).action == "regroup"


def test_run_stops_at_its_last_round_after_the_commit(tmp_path):
    sea = Sea(tmp_path, {"stop.rounds": 1})
    ranks = sea.formed(*sea.ranks("a", "b"))
    assert [i.round for i in ranks[0].formed.intervals] == [1]
    sea.trained(ranks, 1, upload=False)
    before = ranks[0].boundary(1)
    for rank in ranks:
        rank.hand_in(1)

    assert before.action == "wait"
    assert not sea.coordinator.is_finished()
    assert sea.settle() == 1
    assert [rank.boundary(1).action for rank in ranks] == ["stop", "stop"]
    assert sea.coordinator.is_finished()
    assert (ranks[0].watch().action, ranks[0].watch().group) == ("train", ranks[0].number)
    assert ranks[0].join().ask().action == "stop"
    assert sea.audit().clean


def test_stop_in_tokens_ends_with_the_round_that_reaches_it(tmp_path):
    tokens = ROUND_STEPS * 5 * 4
    sea = Sea(tmp_path, {"stop": {"tokens": 2 * tokens}})
    ranks = sea.formed(*sea.ranks("a", "b"))
    for number in (1, 2):
        sea.trained(ranks, number)
        sea.settle()

    assert sea.coordinator.is_finished()
    assert sea.coordinator.status().tokens == 2 * tokens


def test_operators_stop_lets_the_round_be_committed(sea, trio):
    sea.coordinator.order("stop")
    sea.trained(trio, 1, upload=False)
    before = trio[0].boundary(1)
    for rank in trio:
        rank.hand_in(1)
    sea.settle()

    assert before.action == "wait"
    assert [rank.boundary(1).action for rank in trio] == ["stop"] * 3


def test_pause_holds_all_at_the_boundary(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    sea.coordinator.order("pause")
    held = trio[0].boundary(1)
    sea.coordinator.order("run")

    assert held.action == "wait"
    assert trio[0].boundary(1).action == "go"


def test_boundary_of_a_round_that_is_not_planned_is_refused(trio):
    with pytest.raises(WrongRound, match="round=3 of the boundary is not planned"):
        trio[0].boundary(3)
