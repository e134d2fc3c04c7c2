"""Ranks of a sharded run in one process, in threads or in fibers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from atoll.clock import Clock, SystemClock
from atoll.collectives.base import Collectives
from atoll.collectives.exchange import Way
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline, Threaded
from atoll.simulate.fibers import Scheduler

Work = Callable[[Collectives, Clock], Any]


def threads(
    size: int, work: Work, *, way: Way = "ring", group: int = 1, timeout_seconds: float = 30.0
) -> list[Any]:
    """What each rank's work returned, each rank a thread with another for its collectives."""
    clock = SystemClock()
    ranks = LocalGroup(size, clock=clock, group=group)

    @contextmanager
    def opened(number: int) -> Iterator[Collectives]:
        runner = Threaded(f"rank-{number}")
        try:
            yield ranks.rank(number, runner, way=way, timeout_seconds=timeout_seconds)
        finally:
            runner.close()

    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        members = [stack.enter_context(opened(number)) for number in range(size)]
        return [made.result() for made in [pool.submit(work, one, clock) for one in members]]


def fibers(
    size: int, work: Work, *, way: Way = "ring", group: int = 1, timeout_seconds: float = 30.0
) -> list[Any]:
    """The same in fibers on a virtual clock, without a thread beside them."""
    scheduler = Scheduler()
    ranks = LocalGroup(size, clock=scheduler, group=group)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        one = ranks.rank(number, Inline(), way=way, timeout_seconds=timeout_seconds)
        found[number] = work(one, scheduler)

    for number in range(size):
        scheduler.spawn(f"rank-{number}", partial(run, number))
    scheduler.run_until(lambda: len(found) == size, limit_seconds=1e6)
    return [found[number] for number in range(size)]
