"""Values from pool to pool, and their gradients back on the same routes.

Each message is a slice of rows of some items, in the order of the routes, rounded to the wire's
dtype if there is one. What arrives is a leaf: no graph crosses an edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.layout import Span
from atoll.pools.arrows.base import Arrow, Meeting, packed, unpacked
from atoll.pools.calls import Item
from atoll.pools.desk import Desk, Parts
from atoll.pools.routes import Route


@dataclass(frozen=True, kw_only=True)
class Edge(Arrow):
    """One value on its way from the pool that computes it to one that asks for it."""

    value: str
    source: str  # pool
    to: str  # pool
    routes: tuple[Route, ...]
    wire: torch.dtype | None = None

    def local(self, desk: Desk, rows: Span) -> slice:
        """Rows of a step as this rank counts its own."""
        start = desk.seat.rows.start
        return slice(rows.start - start, rows.stop - start)

    def sent(self, desk: Desk, parts: Sequence[Tensor], to: int) -> None:
        """One message; gradients and values rounded to the wire's dtype, once, counts never."""
        bodies = self._bodies(parts)
        flat = bodies[0] if len(bodies) == 1 else packed([one.view(torch.uint8) for one in bodies])
        desk.world.send(desk.key(self.unit), flat, to=to).wait()

    def received(self, desk: Desk, like: Sequence[Tensor], source: int) -> list[Tensor]:
        """The parts of one message, in the shapes and the dtype of these."""
        bodies = self._bodies(like)
        flat = torch.empty_like(bodies[0])
        if len(bodies) > 1:
            flat = torch.empty(sum(one.nbytes for one in bodies), dtype=torch.uint8)
        desk.world.receive(desk.key(self.unit), flat, source=source).wait()
        if len(bodies) == 1:
            return unpacked(flat.to(like[0].dtype), like)
        counts, floats = ([one for one in like if _is_count(one) is k] for k in (True, False))
        cut = bodies[0].nbytes
        return [
            *unpacked(flat[cut:].view(bodies[1].dtype).to(floats[0].dtype), floats),
            *unpacked(flat[:cut].view(bodies[0].dtype), counts),
        ]

    def _bodies(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What travels: counts first, so that they stand at multiples of their size."""
        floats = packed([part for part in parts if not _is_count(part)])
        if self.wire is not None:
            floats = floats.to(self.wire)
        counts = [part for part in parts if _is_count(part)]
        return [packed(counts), floats] if counts else [floats]


def _is_count(part: Tensor) -> bool:
    return not part.is_floating_point()


@dataclass(frozen=True, kw_only=True)
class ValueEdge(Edge):
    """From those who computed a value to those whose functions ask for it."""

    def meetings(self) -> Sequence[Meeting]:
        return [Meeting(self.name, (one.source, one.to), is_send=True) for one in self.routes]

    def run(self, desk: Desk) -> None:
        arrived = self.room(desk) if desk.seat.pool == self.to else {}
        for route in self.routes:
            if desk.seat.rank == route.source:
                outputs = desk.outputs[self.value]
                rows = self.local(desk, route.rows)
                parts = [outputs[item].detach()[rows] for item in route.items]
                self.sent(desk, parts, route.to)
            elif desk.seat.rank == route.to:
                rows = self.local(desk, route.rows)
                places = [arrived[item][rows] for item in route.items]
                came = self.received(desk, places, route.source)
                for place, part in zip(places, came, strict=True):
                    place.copy_(part)
        if desk.seat.pool == self.to:
            desk.put_leaves(self.value, arrived)

    def room(self, desk: Desk) -> Parts:
        """For the rows and items of this rank."""
        spec = desk.trace.values[self.value]
        wanted: Sequence[Item] = [None] if spec.axis is None else list(desk.items[spec.axis])
        return {item: torch.zeros(desk.num_rows, *spec.shapes[item]) for item in wanted}


@dataclass(frozen=True, kw_only=True)
class GradientEdge(Edge):
    """Back to those who computed the value: partial sums, added to what is there."""

    def meetings(self) -> Sequence[Meeting]:
        return [Meeting(self.name, (one.to, one.source), is_send=True) for one in self.routes]

    def run(self, desk: Desk) -> None:
        for route in self.routes:
            if desk.seat.rank == route.to:
                self.sent(desk, self.places(desk, route), route.source)
            elif desk.seat.rank == route.source:
                places = self.places(desk, route)
                came = self.received(desk, places, route.to)
                for place, part in zip(places, came, strict=True):
                    place.add_(part)

    def places(self, desk: Desk, route: Route) -> list[Tensor]:
        """Gradients, and where a canary crosses the rows that they are over, on either side."""
        rows = self.local(desk, route.rows)
        tables = [desk.leaf_grads, desk.leaf_counts][: 1 + desk.is_counting]
        return [table[self.value][item][:, rows] for table in tables for item in route.items]
