"""Torchrun launches among ranks that ask for a group: pure functions.

With `transport = "torch_dist"` only all processes of one launch can be a group, in the order of
their torch ranks: nobody else is connected with them. Another launch waits.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from atoll.errors import ProtocolError
from atoll.protocol.sharded import Launch

Launches = Mapping[str, Launch]  # of ranks that ask, by worker_id


def check(name: str, launch: Launch | None, others: Launches, *, is_wanted: bool) -> None:
    """ProtocolError unless a rank is of a launch where one is wanted, and fits the others of it."""
    if launch is None:
        if is_wanted:
            raise ProtocolError(
                f"worker_id={name!r} is of no torchrun launch, and with sharded.transport="
                f"'torch_dist' a group is one; start it with torchrun --nproc-per-node N -m atoll "
                f"join, or the run with sharded.transport = 'grpc'"
            )
        return
    if not is_wanted:
        raise ProtocolError(
            f"launch={launch.id!r} of worker_id={name!r}: only with sharded.transport="
            f"'torch_dist' a group is a torchrun launch; start `atoll join` without torchrun"
        )
    for other, its in others.items():
        if other == name or its.id != launch.id:
            continue
        if its.size != launch.size:
            raise ProtocolError(
                f"launch.size={launch.size} of worker_id={name!r}: {other!r} of the same launch "
                f"says {its.size}; torchrun tells all processes of a launch the same, so start it "
                f"again"
            )
        if its.rank == launch.rank:
            raise ProtocolError(
                f"launch.rank={launch.rank} of worker_id={name!r} is that of {other!r}; each "
                f"process of a launch has its own, so start it again"
            )


def chosen(launches: Launches, *, least: int) -> list[str]:
    """The processes of the first launch that can be a group, by torch rank; empty: there is none.

    All of it ask, and they are at least so many. The first is that of the lowest worker_id.
    """
    able = (names for names in _by_launch(launches) if not _lacks(names, launches, least=least))
    return list(next(able, ()))


def notes(launches: Launches, *, least: int, group: int) -> tuple[str, ...]:
    """Why those that ask are in no group; `group` is the number of the one that trains, or 0."""
    found = []
    for names in _by_launch(launches):
        lacks = _lacks(names, launches, least=least)
        if not lacks and group:
            lacks = f"is a spare while group {group}, another launch, trains"
        if lacks:
            found.append(f"the launch of {names[0]!r} {lacks}")
    return tuple(found)


def _by_launch(launches: Launches) -> list[Sequence[str]]:
    """The names of each launch by torch rank, the launch of the lowest name first."""
    ordered = sorted(launches, key=lambda name: (launches[name].id, launches[name].rank))
    found = [list(names) for _, names in groupby(ordered, key=lambda name: launches[name].id)]
    return sorted(found, key=min)


def _lacks(names: Sequence[str], launches: Launches, *, least: int) -> str:
    """What keeps a launch from being a group; empty when nothing does."""
    size = launches[names[0]].size
    if [launches[name].rank for name in names] != list(range(size)):
        return f"waits for its other processes: {len(names)} of {size} ask for a group"
    if size < least:
        return (
            f"has {size} processes, fewer than membership.min_workers={least}; start it with more"
        )
    return ""
