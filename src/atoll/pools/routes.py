"""Which rank sends which rows and items of a value to whom: a pure function of the placement."""

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.layout import Span
from atoll.pools.calls import Item
from atoll.pools.declared import Pool
from atoll.pools.placement import Placement, Seat
from atoll.pools.trace import Spec


@dataclass(frozen=True, slots=True)
class Route:
    """One message of an edge: these rows (counted within a step) and items of one value."""

    source: int
    to: int
    rows: Span
    items: tuple[Item, ...]


def check_edge(name: str, source: Pool, to: Pool) -> None:
    """ConfigError unless the rows of the two pools divide on this edge, in either direction."""
    if source.ranks % to.ranks and to.ranks % source.ranks:
        raise ConfigError(
            f"edge {name!r} from {source} to {to}: neither divides the other; rows would cross "
            f"ragged, so choose sizes of which one is a multiple of the other"
        )


def routes(placement: Placement, spec: Spec, source: str, to: str) -> list[Route]:
    """In an order that is the same on all ranks: by receiver, then by sender."""
    return [
        Route(sender.rank, receiver.rank, rows, items)
        for receiver in placement.of(to)
        for sender in placement.of(source)
        if len(rows := _shared(sender.rows, receiver.rows))
        if (items := _items(placement, spec, sender, receiver))
    ]


def _shared(one: Span, other: Span) -> Span:
    start = max(one.start, other.start)
    return Span(start, max(start, min(one.stop, other.stop)))


def _items(placement: Placement, spec: Spec, sender: Seat, receiver: Seat) -> tuple[Item, ...]:
    if spec.axis is None:
        return (None,) if sender.block == 0 else ()
    wanted = placement.items(receiver)[spec.axis]
    return tuple(item for item in placement.items(sender)[spec.axis] if item in wanted)
