"""What one rank holds of a sharded model: weights, moments and gradient sums of the spans it owns.

    [weights | first moments | second moments | gradient sums]

each the rank's spans of all units, one after another. The first three sections, in this order and
little-endian, are what a save holds; the sums live from a step's first micro-batch to its end.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from atoll.collectives import memory
from atoll.errors import LayoutMismatch
from atoll.layout import Span, TensorSpec
from atoll.strategies.sharded import offload as offloading
from atoll.strategies.sharded.offload import Offload
from atoll.strategies.sharded.units import Units

Section = Literal["weights", "first_moments", "second_moments", "sums"]
SAVED: tuple[Section, ...] = ("weights", "first_moments", "second_moments")
SECTIONS: tuple[Section, ...] = (*SAVED, "sums")
TILE_ELEMENTS = 1 << 18  # as the compiled loops like them; any size gives the same bits

assert sys.byteorder == "little", "saves hold the memory as it lies"


class Shard:
    """The state of rank `rank` of `size`; all zero at first. Not thread-safe."""

    def __init__(
        self,
        units: Units,
        *,
        rank: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        offload: Offload = "none",
        directory: Path | None = None,
    ) -> None:
        self.units = units
        self.rank = rank
        self.size = size
        self.dtype = dtype
        self.owned = units.owned(rank, size)  # of each unit, in the flat layout
        self.elements = units.shard_size(rank, size)  # of one section
        self._starts = _starts(self.owned)  # of each unit's span, in a section
        total = len(SECTIONS) * self.elements
        self._room = offloading.room(total, dtype, offload=offload, directory=directory)

    @property
    def nbytes(self) -> int:
        """Of all sections."""
        return len(SECTIONS) * self.elements * self.dtype.itemsize

    @property
    def section_nbytes(self) -> int:
        """Of one section; a save has `len(SAVED)` of them."""
        return self.elements * self.dtype.itemsize

    # Values

    def of(self, unit: int, section: Section) -> Tensor:
        """This rank's span of a unit, flat; writing to it writes to the shard."""
        start = self._starts[unit]
        return self.view(section, Span(start, start + len(self.owned[unit])))

    def view(self, section: Section, span: Span) -> Tensor:
        """A part of a section, counted from the section's start; writing writes to the shard."""
        self._check(span)
        first = SECTIONS.index(section) * self.elements
        return self._room.values[first + span.start : first + span.stop]

    def release(self, section: Section, span: Span) -> None:
        """These values are not needed for now: on the disk they leave the resident memory."""
        first = SECTIONS.index(section) * self.elements
        self._room.release(first + span.start, first + span.stop)

    def release_unit(self, unit: int, section: Section) -> None:
        """The same for this rank's span of a unit."""
        start = self._starts[unit]
        self.release(section, Span(start, start + len(self.owned[unit])))

    def pieces(self, unit: int) -> Iterator[tuple[TensorSpec, Span]]:
        """The tensors that this rank's span of a unit cuts through, with their place in a section.

        The tensors' own offsets are those of the unit.
        """
        first = self.units.units[unit].span.start
        owned = self.owned[unit]
        moved = self._starts[unit] - (owned.start - first)
        inside = Span(owned.start - first, owned.stop - first)
        for tensor, span in self.units.units[unit].pieces(inside):
            yield tensor, Span(span.start + moved, span.stop + moved)

    # Bytes, as they are saved and restored

    def read(self, section: Section, span: Span) -> bytes:
        """A part of a section as it is saved: little-endian, in the order of the shard."""
        found = bytes(memory.bytes_of(self.view(section, span)))
        self.release(section, span)
        return found

    def write(self, section: Section, start: int, data: bytes | bytearray | memoryview) -> None:
        """Puts bytes that `read` gave, of this or of another rank, in their place."""
        elements, rest = divmod(len(data), self.dtype.itemsize)
        if rest:
            raise LayoutMismatch(
                f"{len(data)} bytes for {section!r} at element {start} are no whole number of "
                f"{self.dtype}; give whole elements"
            )
        if not elements:
            return
        span = Span(start, start + elements)
        memory.bytes_of(self.view(section, span))[:] = memoryview(data).cast("B")
        self.release(section, span)

    def place(self, flat: Span) -> Iterator[tuple[Span, Span]]:
        """What of a span of the run's flat layout this rank owns: (in the layout, in a section)."""
        for owned, start in zip(self.owned, self._starts, strict=True):
            first, last = max(flat.start, owned.start), min(flat.stop, owned.stop)
            if first < last:
                moved = start - owned.start
                yield Span(first, last), Span(first + moved, last + moved)

    def fill(self, section: Section, start: int, values: Tensor) -> None:
        """Puts what this rank owns of flat `values`, which begin at `start` in the layout."""
        for flat, place in self.place(Span(start, start + len(values))):
            self.view(section, place).copy_(values[flat.start - start : flat.stop - start])
            self.release(section, place)

    def clear(self, section: Section) -> None:
        """All zero."""
        for span in self.tiles():
            self.view(section, span).zero_()
            self.release(section, span)

    def tiles(self) -> Iterator[Span]:
        """A section in pieces that fit a processor's cache."""
        for start in range(0, self.elements, TILE_ELEMENTS):
            yield Span(start, min(start + TILE_ELEMENTS, self.elements))

    def close(self) -> None:
        """Nobody uses it any more."""
        self._room.close()

    def _check(self, span: Span) -> None:
        if not 0 <= span.start <= span.stop <= self.elements:
            raise LayoutMismatch(
                f"elements [{span.start}, {span.stop}) are not in a section of rank {self.rank} of "
                f"{self.size}, which has {self.elements}"
            )


def _starts(owned: tuple[Span, ...]) -> list[int]:
    starts, here = [], 0
    for span in owned:
        starts.append(here)
        here += len(span)
    return starts
