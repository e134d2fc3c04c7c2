"""How far apart the members of a group are, measured before they train."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from atoll.clock import Clock
from atoll.collectives import schedule
from atoll.collectives.grpc import dial
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.peers import Pings
from atoll.errors import AtollError

TIMES = 3  # the least counts: a busy machine only ever adds
PINGED_AT_ONCE = 16


def measured(
    group: RankGroup,
    rank: int,
    *,
    identity: Identity | None,
    clock: Clock,
    timeout_seconds: float = 5.0,
) -> Pings:
    """The way to every other member and back, and who was not reached in `timeout_seconds`.

    A member that has not entered the group yet is called again until then. The caller's own server
    must have entered it, so that the others reach it as well.
    """
    others = schedule.others(rank, group.size)
    one = partial(_least_ms, group, rank, identity, clock, timeout_seconds)
    with ThreadPoolExecutor(PINGED_AT_ONCE, thread_name_prefix="ping") as pool:
        found = dict(zip(others, pool.map(one, others), strict=True))
    reached = {to: taken for to, taken in found.items() if taken is not None}
    return Pings(reached, tuple(sorted(found.keys() - reached)))


def _least_ms(
    group: RankGroup,
    rank: int,
    identity: Identity | None,
    clock: Clock,
    timeout_seconds: float,
    to: int,
) -> float | None:
    until = clock.now() + timeout_seconds

    def once(ping: Any) -> float:
        began = clock.now()
        ping(b"", metadata=group.metadata(rank), timeout=max(0.001, until - began))
        return (clock.now() - began) * 1000.0

    while clock.now() < until:
        try:
            with dial.typed(), dial.channel(group, to, identity) as channel:
                ping: Any = channel.unary_unary(f"/{dial.SERVICE}/Ping")
                once(ping)  # with the dialling, which does not count
                return min(once(ping) for _ in range(TIMES))
        except AtollError as error:
            if not error.retry:
                return None
        clock.sleep(min(dial.REDIAL_SECONDS, max(0.0, until - clock.now())))
    return None
