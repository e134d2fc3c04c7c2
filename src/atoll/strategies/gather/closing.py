"""When a round of a gather run closes: primaries, and reserves in the places of those missing.

Of the workers that were ever given rows of a round the first `primaries` by worker_id are its
primaries, the others its reserves, in order. Reserves step in once every primary is settled:
accepted, without its rows, or gone. After `primary_seconds` whoever has announced nothing is not
waited for any more, and places go to those that have, in the same order. Never more are taken than
`primaries`, never a round closes with fewer than `min_workers`.
"""

from collections.abc import Set
from dataclasses import dataclass

from atoll.protocol.manifest import GatherSettings
from atoll.strategies.base import RoundView
from atoll.strategies.diloco.sync import Sync


@dataclass(frozen=True, slots=True)
class Lists:
    """The primaries of a round and its reserves, each in order."""

    primaries: tuple[str, ...]
    reserves: tuple[str, ...]

    @classmethod
    def of(cls, view: RoundView, settings: GatherSettings) -> "Lists":
        """A pure function of who was given rows."""
        given = sorted({*view.planned, *view.ended, *view.accepted})
        count = settings.primaries or len(given)
        return cls(tuple(given[:count]), tuple(given[count:]))


def places(view: RoundView, settings: GatherSettings) -> int:
    """How many more contributions the round takes."""
    found = Lists.of(view, settings)
    return max(0, (settings.primaries or len(found.primaries)) - len(view.accepted))


def wanted(view: RoundView, settings: GatherSettings) -> frozenset[str]:
    """Workers whose contributions the round takes now; it waits for them."""
    found, free = Lists.of(view, settings), places(view, settings)
    if not free:
        return frozenset()
    coming = (view.planned & view.live) - view.accepted
    if 0 < settings.primary_seconds <= view.open_seconds:
        announced = [w for w in (*found.primaries, *found.reserves) if w in coming & view.announced]
        return frozenset(announced[:free])
    unsettled = coming & {*found.primaries}
    if unsettled:
        return frozenset(unsettled)
    return frozenset([w for w in found.reserves if w in coming][:free])


@dataclass(frozen=True)
class ByPull(Sync):
    """The answers of a synchronous run that are others where contributions are pulled."""

    def reserves(self, view: RoundView) -> tuple[str, ...]:
        return Lists.of(view, self.manifest.gather).reserves

    def places(self, view: RoundView) -> int:
        return places(view, self.manifest.gather)

    def has_quorum(self, view: RoundView) -> bool:
        settings = self.manifest.membership
        if settings.quorum:
            return len(view.accepted) >= settings.quorum
        return len(view.accepted) >= settings.min_workers and not self.places(view)

    def waiting_for(self, view: RoundView) -> Set[str]:
        return wanted(view, self.manifest.gather)
