"""Which tensors are gathered together, and who owns which part of them.

A pure function of a layout and the number of ranks. Unit 0 is the root: all that is in no block,
tied weights included; a model without such tensors has no root. Then comes one unit for each block,
in the order of their numbers. The run's layout is ordered by unit, so a
unit is one span of the flat buffer, and each rank owns an even part of every unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.layout import Fragment, Layout, Span, TensorSpec, cut
from atoll.strategies import blocks
from atoll.strategies.sharded.holding import Holding

ROOT = ""  # the name of the module that the root is


def names(layout: Layout) -> list[list[str]]:
    """The names of each unit's tensors, whatever order the layout has."""
    return [[t.name for t in unit] for _, unit in _dealt(layout)]


def _dealt(layout: Layout) -> list[tuple[str, list[TensorSpec]]]:
    """Each unit's module and tensors, in the layout's order."""
    found, others = blocks.of(layout)
    root, units = list(others), []
    for block, tensors in found.items():
        # A list of parameters has numbers, too, but is no module that could be waited for.
        if any(tensor.name == block for tensor in tensors):
            root.extend(tensors)
        else:
            units.append((block, list(tensors)))
    root.sort(key=lambda tensor: tensor.offset)
    return [(ROOT, root), *units] if root else units


@dataclass(frozen=True)
class Unit:
    """A part of the model that is gathered, freed and reduced on its own."""

    number: int
    module: str  # by its name in the model; the root's is empty
    layout: Layout  # of its own tensors, counted from its own first element
    span: Span  # of the run's layout

    @property
    def size(self) -> int:
        """Elements."""
        return self.layout.size

    def pieces(self, span: Span) -> Iterator[tuple[TensorSpec, Span]]:
        """The tensors that a span of the unit cuts through, with what it holds of each."""
        for tensor in self.layout.tensors:
            start, stop = max(span.start, tensor.span.start), min(span.stop, tensor.span.stop)
            if start < stop:
                yield tensor, Span(start, stop)


@dataclass(frozen=True)
class Units:
    """A run's layout, which is ordered by unit, and its units."""

    layout: Layout
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Units":
        """The units of a run's `layout`, which holds its tensors in their order."""
        dealt = _dealt(layout)
        parts: tuple[Fragment, ...] = cut(layout, [[t.name for t in unit] for _, unit in dealt])
        made = zip(dealt, parts, strict=True)
        return cls(
            layout,
            tuple(Unit(k, name, p.layout, p.span) for k, ((name, _), p) in enumerate(made)),
        )

    @classmethod
    def of_model(cls, layout: Layout) -> "Units":
        """The units of a model whose `layout` is in the model's own order."""
        return cls.of(layout.ordered(name for unit in names(layout) for name in unit))

    @property
    def largest(self) -> int:
        """Elements of the largest unit."""
        return max(unit.size for unit in self.units)

    def owned(self, rank: int, size: int) -> tuple[Span, ...]:
        """What `rank` of `size` owns: of each unit a span of the flat layout, which may be empty.

        One after another, in this order, they are the rank's shard.
        """
        return Holding(tuple(unit.span for unit in self.units), size, rank).spans

    def shard_size(self, rank: int, size: int) -> int:
        """Elements that `rank` of `size` owns."""
        return sum(len(span) for span in self.owned(rank, size))
