"""Local ranks far apart: messages, pings and reads take their virtual time, and the bits stay."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from atoll.collectives.base import Key
from atoll.collectives.local import LocalGroup, LocalMember
from atoll.collectives.peers import Pings
from atoll.collectives.runners import Inline
from atoll.errors import ConfigError, GroupBroken, MissingRanks
from atoll.simulate.fibers import Scheduler

# Seconds from row to column: there and back differ, and ranks 0 and 1 are near each other.
FAR = [[0.0, 0.01, 0.3], [0.02, 0.0, 0.4], [0.1, 0.2, 0.0]]


class Same:
    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        yield f"{name} {start} {stop}".encode()[: stop - start]


def told(
    work: Callable[[LocalMember], Any], latency: list[list[float]] | None, **options: Any
) -> tuple[list[Any], list[float]]:
    """What each rank's work gave, and when it was done."""
    scheduler = Scheduler()
    size = len(latency or FAR)
    group = LocalGroup(size, clock=scheduler, latency=latency)
    found: dict[int, tuple[Any, float]] = {}

    members = [group.rank(rank, Inline(), source=Same(), **options) for rank in range(size)]

    def run(rank: int) -> None:
        made = work(members[rank])
        found[rank] = (made, scheduler.now())

    for rank in range(size):
        scheduler.spawn(f"rank-{rank}", partial(run, rank))
    scheduler.run_until(lambda: len(found) == size, limit_seconds=1e6)
    return [found[k][0] for k in range(size)], [found[k][1] for k in range(size)]


def reduced(ranks: LocalMember) -> torch.Tensor:
    own = torch.randn(101, generator=torch.Generator().manual_seed(ranks.rank))
    ranks.all_reduce(Key(group=1, step=1, op="reduce"), own).wait()
    return own


@pytest.mark.parametrize("way", ["ring", "direct"])
def test_distance_changes_the_time_and_no_bit(way):
    near, at_once = told(reduced, None, way=way, chunk_bytes=64)
    far, later = told(reduced, FAR, way=way, chunk_bytes=64)

    assert at_once == [0.0] * 3
    assert min(later) >= 0.3
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_barrier_takes_as_long_as_the_slowest_message_to_each():
    def work(ranks: LocalMember) -> None:
        ranks.barrier(Key(group=1, step=1, op="control")).wait()

    assert told(work, FAR)[1] == pytest.approx([0.1, 0.2, 0.4])


def test_chunks_of_one_message_are_under_way_together():
    """Latency is paid once a turn, not once a chunk."""
    far = [[0.0, 0.25], [0.25, 0.0]]

    assert told(reduced, far, chunk_bytes=8)[1] == pytest.approx([0.5, 0.5])


def test_rank_too_far_away_is_missing_and_named():
    def work(ranks: LocalMember) -> tuple[int, ...]:
        try:
            ranks.barrier(Key(group=1, step=1, op="control")).wait()
        except MissingRanks as error:
            return error.ranks
        return ()

    found, when = told(work, FAR, timeout_seconds=0.15)

    assert found == [(), (2,), (0, 1)]
    assert when == pytest.approx([0.1, 0.15, 0.15])


def test_abort_reaches_who_waits_for_something_under_way():
    scheduler = Scheduler()
    group = LocalGroup(2, clock=scheduler, latency=[[0.0, 9.0], [9.0, 0.0]])
    found: list[float] = []

    def waits() -> None:
        with pytest.raises(GroupBroken):
            group.rank(0, Inline()).barrier(Key(group=1, step=1, op="control")).wait()
        found.append(scheduler.now())

    def sends_and_ends_it() -> None:
        ranks = group.rank(1, Inline())
        begun = ranks.barrier(Key(group=1, step=1, op="control"))
        with pytest.raises(MissingRanks):
            group.rank(1, Inline(), timeout_seconds=1.0).barrier(
                Key(group=1, step=2, op="control")
            ).wait()
        group.mailboxes[0].abort(GroupBroken("over"))
        del begun

    scheduler.spawn("waits", waits)
    scheduler.spawn("ends", sends_and_ends_it)
    scheduler.run_until(lambda: bool(found), limit_seconds=1e6)

    assert found == [1.0]


def test_pings_tell_the_way_there_and_back():
    scheduler = Scheduler()
    group = LocalGroup(3, clock=scheduler, latency=FAR)

    found = group.pings(0)

    assert found.milliseconds == pytest.approx({1: 30.0, 2: 400.0})
    assert scheduler.now() == pytest.approx(0.4)


def test_rank_that_left_is_not_reached():
    group = LocalGroup(3, clock=Scheduler())
    group.rank(2, Inline()).close()

    assert group.pings(0) == Pings({1: 0.0}, (2,))


def test_read_takes_the_way_there_and_back():
    def work(ranks: LocalMember) -> bytes:
        return b"".join(ranks.read((ranks.rank + 1) % 3, "save", 1, 4))

    found, when = told(work, FAR)

    assert found == [b"sav"] * 3
    assert when == pytest.approx([0.03, 0.6, 0.4])


@pytest.mark.parametrize("latency", [[[0.0]], [[0.0, 0.0], [0.0]], []])
def test_latency_of_other_ranks_is_refused(latency):
    with pytest.raises(ConfigError, match="latency"):
        LocalGroup(2, clock=Scheduler(), latency=latency)
