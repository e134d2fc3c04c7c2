"""Gathers over 1 to 5 ranks in virtual time: reserves step in, and all ranks know the same."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.errors import AtollError, ConfigError, DiskFailed, GroupBroken, ProtocolError
from atoll.gather import publish
from atoll.gather.fetch import Fetched
from atoll.gather.peers import PeerList
from atoll.gather.reserves import Gather
from atoll.gather.result import Merged
from atoll.gather.turns import Turns
from atoll.gather.words import Reason
from atoll.layout import Layout
from atoll.simulate.fibers import Scheduler
from tests.fetching import NBYTES, Manner, PlayedBucket, fetcher, peer, played

LAYOUT = Layout.of([("a", (10,), "float32"), ("b", (3,), "float32")])
PRIMARIES = [f"p{k}" for k in range(7)]
RESERVES = [f"r{k}" for k in (5, 3, 9, 1, 7)]  # in the order in which they step in


class Window:
    """One bucket, a group of ranks with a spool each, and what each rank's gather says."""

    def __init__(self, home: Path, size: int) -> None:
        self.home, self.size = home, size
        self.scheduler = Scheduler()
        self.bucket = PlayedBucket(self.scheduler)
        self.asked: list[tuple[float, str]] = []  # when, whom
        for uid in PRIMARIES + RESERVES:
            self.bucket.publish(uid)

    def lose(self, *uids: str) -> None:
        for uid in uids:
            del self.bucket.objects[publish.statement_key(f"peers/{uid}", 7)]

    def run(self, *, seconds: float = 100.0, change: Any = None, **options: Any) -> list[Any]:
        group = LocalGroup(self.size, clock=self.scheduler)
        works = [partial(self._rank, group, k, seconds, change, options) for k in range(self.size)]
        return played(*works, scheduler=self.scheduler)

    def _rank(
        self, group: LocalGroup, rank: int, seconds: float, change: Any, options: dict[str, Any]
    ) -> Merged | AtollError:
        ranks: Collectives = group.rank(rank, Inline(), timeout_seconds=500.0)
        by = fetcher(
            self.scheduler, {"main": self.bucket}, self.home / f"{self.size}-{rank}", rank=rank
        )

        def fetch(peers: Any, deadline: float) -> Fetched:
            self.asked += [(self.scheduler.now(), one.uid) for one in peers]
            if change is not None:
                change(rank, peers)
            return by.fetch(peers, deadline=deadline)

        lists = PeerList(tuple(map(peer, PRIMARIES)), tuple(map(peer, RESERVES)))
        sizes = dict.fromkeys(PRIMARIES + RESERVES, NBYTES)
        made: dict[str, Any] = {"sizes": sizes, "base_version": 3, **options}
        peers = made.pop("peers", lambda _: lists)(rank)
        gather = Gather(
            ranks=ranks,
            turns=Turns(1, 7),
            clock=self.scheduler,
            fetch=fetch,
            layout=LAYOUT,
            **made,
        )
        try:
            return gather.run(peers, seconds=seconds)
        except AtollError as error:
            return error


@pytest.fixture
def window(tmp_path: Path) -> Callable[[int], Window]:
    return lambda size: Window(tmp_path, size)


def test_all_ranks_at_every_number_of_ranks_know_the_same(window):
    """Skips, retries, reserves of which some fail: all but the time is equal to the bit."""
    found: list[Merged] = []
    for size in range(1, 6):
        made = window(size)
        made.lose("p1", "p4", "r3")
        made.bucket.publish("p5", window=8)
        made.bucket.manners = {
            "p2": Manner(breaks_at=50_000),
            "p6": Manner(rate=4e4 * size),
            "r9": Manner(away=(0.0, 12.0)),
        }
        found += made.run()

        tried = Counter(uid for _, uid in made.asked)
        assert max(tried.values()) == 1
        assert set(tried) == {*PRIMARIES, "r5", "r3", "r9", "r1"}
        assert made.bucket.bytes_sent() == 7 * NBYTES

    first = found[0]
    assert len(found) == 15 and all(one == first for one in found)
    assert len({one.digest for one in found}) == 1
    assert first.uids == ("p0", "p2", "p3", "p6", "r1", "r5", "r9")
    assert first.reasons == {
        "p1": Reason.MISSING,
        "p4": Reason.MISSING,
        "p5": Reason.STATEMENT,
        "r3": Reason.MISSING,
    }
    assert first.success_rate == 1.0
    assert first.global_steps == (3,) * 7


def test_reserves_begin_once_all_primaries_are_settled_as_many_as_are_missing(window):
    made = window(3)
    made.lose("p0", "p3")
    made.bucket.manners = {"p6": Manner(rate=1e4)}

    [found, *_] = made.run()

    late = [(at, uid) for at, uid in made.asked if uid in RESERVES]
    assert {uid for _, uid in late} == {"r5", "r3"}
    assert min(at for at, _ in late) >= NBYTES / 1e4  # the slowest primary's time
    assert found.success_rate == 1.0


def test_reserves_are_asked_again_until_their_list_ends_and_failed_ones_are_skips(window):
    made = window(2)
    made.lose("p0", "p3", "r5", "r3", "r9", "r1")

    found = made.run(seconds=1000.0)

    assert found[0] == found[1]
    assert found[0].uids == ("p1", "p2", "p4", "p5", "p6", "r7")
    assert set(found[0].skipped_uids) == {"p0", "p3", "r5", "r3", "r9", "r1"}
    assert found[0].success_rate == 6 / 7
    order = [uid for _, uid in sorted(made.asked) if uid in RESERVES]
    assert sorted(order[:2]) == ["r3", "r5"] and sorted(order[2:4]) == ["r1", "r9"]


def test_no_reserve_is_asked_where_nobody_is_missing(window):
    made = window(2)

    [found, _] = made.run()

    assert found.uids == tuple(PRIMARIES)
    assert {uid for _, uid in made.asked} == set(PRIMARIES)


def test_primaries_end_early_enough_to_leave_reserves_their_time(window):
    made = window(2)
    made.bucket.manners = {"p0": Manner(rate=1e3)}

    [found, _] = made.run(seconds=20.0)
    control = window(2)
    control.bucket.manners = {"p0": Manner(rate=1e3)}
    [without, _] = control.run(seconds=20.0, reserve_share=0.0)

    assert found.reasons == {"p0": Reason.SLOW}
    assert "r5" in found.uids and found.success_rate == 1.0
    assert "r5" not in without.uids  # the control: primaries use up the time
    assert made.scheduler.now() <= 20.0


def test_time_that_is_over_on_one_rank_ends_the_rounds_on_all(window):
    made = window(3)
    made.lose("p0", "r5", "r3")

    found = made.run(seconds=12.0)

    assert found[0] == found[1] == found[2]
    assert found[0].reasons["p0"] is Reason.MISSING


def test_nobody_valid_is_an_empty_result_on_all_ranks(window):
    made = window(2)
    made.lose(*PRIMARIES, *RESERVES)

    found = made.run(seconds=200.0)

    assert [one.uids for one in found] == [(), ()]
    assert set(found[0].skipped_uids) == {*PRIMARIES, *RESERVES}


def test_failure_of_one_rank_reaches_all_by_name(window):
    def change(rank: int, peers: Any) -> None:
        if rank == 1:
            raise DiskFailed("the disk did not confirm")

    found = window(3).run(change=change)

    assert all(isinstance(error, GroupBroken) for error in found)
    assert all("rank 1: DISK_FAILED: the disk did not confirm" in str(error) for error in found)


def test_ranks_with_different_lists_stop_before_anything_is_fetched(window):
    made = window(3)

    def peers(rank: int) -> PeerList:
        primaries = [peer(uid, "other" if rank == 2 else "main") for uid in PRIMARIES]
        return PeerList(tuple(primaries))

    found = made.run(peers=peers)

    assert all(isinstance(error, ProtocolError) for error in found)
    assert made.asked == []


def test_share_of_time_outside_its_range_is_refused(window):
    [found] = window(1).run(reserve_share=0.5)
    assert found.success_rate == 1.0

    with pytest.raises(ConfigError, match="reserve_share=1"):
        window(1).run(reserve_share=1.0)
