"""What one rank holds of a model that is cut over several: pure arithmetic of units and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from atoll.collectives import schedule
from atoll.errors import ConfigError
from atoll.layout import ELEMENT_BYTES, Span

SECTIONS = ("weights", "first", "second")  # what is kept of every element, in this order


@dataclass(frozen=True)
class Holding:
    """Rank `rank` of `size` holds its part of each unit; `units` are spans of the flat layout.

    A *section* is one value of each of these elements (its weight, or one of its moments), unit
    after unit. All sections one after another, in fp32, are what a save of the rank contains.
    """

    units: tuple[Span, ...]
    size: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank={self.rank} is not one of size={self.size} ranks, 0 to {self.size - 1}"
            )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Of each unit this rank's part, as a span of the flat layout; may be empty."""
        parts = [schedule.cut(len(unit), self.size)[self.rank] for unit in self.units]
        return tuple(
            Span(unit.start + part.start, unit.start + part.stop)
            for unit, part in zip(self.units, parts, strict=True)
        )

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each unit's part begins in a section."""
        return tuple(accumulate((len(span) for span in self.spans), initial=0))[:-1]

    @cached_property
    def elements(self) -> int:
        """Of a section."""
        return sum(len(span) for span in self.spans)

    @property
    def nbytes(self) -> int:
        """Of a save."""
        return len(SECTIONS) * self.elements * ELEMENT_BYTES


def holdings(units: Sequence[Span], size: int) -> list[Holding]:
    """What each of `size` ranks holds."""
    return [Holding(tuple(units), size, rank) for rank in range(size)]
