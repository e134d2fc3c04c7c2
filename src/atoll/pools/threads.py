"""All ranks of a world in one process, a thread each: for checks, tests and small trials."""

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from atoll.clock import SystemClock
from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.errors import GroupBroken
from atoll.pools.desk import GROUP
from atoll.pools.placement import WORLD, Placement

T = TypeVar("T")


def on_threads(
    placement: Placement,
    work: Callable[[int, Mapping[str, Collectives]], T],
    *,
    timeout_seconds: float = 60.0,
) -> list[T]:
    """What `work(rank, groups)` returns on each rank; the first error of a rank is raised.

    When one raises, the others' exchanges end, so that nobody waits for it.
    """
    world = LocalGroup(placement.size, clock=SystemClock(), group=GROUP)
    found: dict[int, T] = {}
    errors: list[tuple[int, Exception]] = []
    members = [
        world.rank(rank, Inline(), way="direct", timeout_seconds=timeout_seconds)
        for rank in range(placement.size)
    ]

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, groups(placement, members[rank]))
        except Exception as error:
            errors.append((rank, error))
            for member in members:
                member.abort(GroupBroken(f"rank {rank} failed: {error}"))

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(placement.size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return [found[rank] for rank in range(placement.size)]


def groups(placement: Placement, world: Collectives) -> dict[str, Collectives]:
    """One rank's collectives by name; called by all ranks at once."""
    named = placement.groups()
    del named[WORLD]
    made = world.subgroups(list(named.values()))
    own = {name: one for name, one in zip(named, made, strict=True) if one is not None}
    return {WORLD: world, **own}
