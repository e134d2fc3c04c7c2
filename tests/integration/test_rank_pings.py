"""Ranks measure how far apart they are, before they are a group that trains."""

import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives.base import Key
from atoll.collectives.grpc import pings
from atoll.errors import MissingRanks
from tests import ranks_on_loopback
from tests.cables import cable

CLOCK = SystemClock()


@pytest.mark.parametrize("is_tls", [False, True])
def test_members_of_a_candidate_group_reach_each_other(is_tls):
    with ranks_on_loopback.servers(3, is_tls=is_tls) as made:
        for server in made.servers:
            server.enter(made.group)

        found = pings.measured(made.group, 1, identity=made.identities[1], clock=CLOCK)

    assert sorted(found.milliseconds) == [0, 2]
    assert all(0 < taken < 1_000 for taken in found.milliseconds.values())
    assert found.missed == ()


def test_those_who_are_not_there_are_named_at_the_deadline():
    """Rank 0 is gone, rank 2 has not entered, rank 3 answers; nobody holds the others up."""
    with ranks_on_loopback.servers(4) as made:
        made.servers[0].close()
        made.servers[3].enter(made.group)

        found = pings.measured(made.group, 1, identity=None, clock=CLOCK, timeout_seconds=0.5)

    assert (sorted(found.milliseconds), found.missed) == ([3], (0, 2))


def test_peer_that_takes_the_connection_and_says_nothing_is_named():
    with ranks_on_loopback.servers(2) as made, cable("127.0.0.1:1") as dead:
        group = made.group_at([dead.address, made.servers[1].address])

        found = pings.measured(group, 1, identity=None, clock=CLOCK, timeout_seconds=0.3)

    assert found.missed == (0,)


def test_peer_that_enters_a_little_later_is_reached():
    class Later(SystemClock):
        def sleep(self, seconds: float) -> None:
            made.servers[0].enter(made.group)
            super().sleep(seconds)

    with ranks_on_loopback.servers(2) as made:
        found = pings.measured(made.group, 1, identity=None, clock=Later())

    assert (sorted(found.milliseconds), found.missed) == ([0], ())


def test_message_to_a_rank_that_only_measures_waits_for_its_mailbox():
    """The first rank to learn that the candidate is the group sends while the other measures."""
    with ranks_on_loopback.servers(2) as made:
        made.servers[1].enter(made.group)
        with made.member(0, timeout_seconds=20) as first:
            begun = first.all_reduce(key := Key(group=1, step=1, op="reduce"), own := torch.ones(9))
            with made.member(1, timeout_seconds=20) as second:
                second.all_reduce(key, torch.ones(9)).wait()
                begun.wait()

    assert own.tolist() == [2.0] * 9


def test_rank_that_measures_for_ever_is_missing_at_the_deadline():
    """The control of the one before."""
    with ranks_on_loopback.servers(2) as made:
        made.servers[1].enter(made.group)
        with (
            made.member(0, timeout_seconds=0.3) as first,
            pytest.raises(MissingRanks) as refused,
        ):
            first.all_reduce(Key(group=1, step=1, op="reduce"), torch.ones(9)).wait()

    assert refused.value.ranks == (1,)
