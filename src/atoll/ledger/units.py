"""How a queue is cut into units, and bitmaps over them: pure arithmetic, no SQL.

Unit u of K covers positions `[u*L//K, (u+1)*L//K)` of an epoch of L rows; a stream has no length,
and its units are of a fixed number of rows. A bitmap is a byte string with unit u at bit `u % 8` of
byte `u // 8`; bits past the last unit are 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the units of one queue begin and end, in positions of the dataset's row sequence."""

    first: int  # the queue's first position: epoch * length
    length: int  # 0: a stream
    units: int  # of a stream: those issued so far
    unit_rows: int  # of a stream; 0 otherwise

    def unit(self, position: int) -> int:
        """The unit that holds `position`."""
        row = position - self.first
        if not self.length:
            return row // self.unit_rows
        return ((row + 1) * self.units - 1) // self.length

    def span(self, unit: int) -> tuple[int, int]:
        """The positions `[start, stop)` of a unit."""
        if not self.length:
            return unit * self.unit_rows, (unit + 1) * self.unit_rows
        start, stop = unit * self.length // self.units, (unit + 1) * self.length // self.units
        return self.first + start, self.first + stop

    def touched(self, start: int, stop: int) -> range:
        """The units that hold a position of `[start, stop)`."""
        return range(self.unit(start), self.unit(stop - 1) + 1)


def units_of(length: int, wanted: int) -> int:
    """How many units an epoch of `length` rows is cut into: as wanted, but at most one per row."""
    return min(length, wanted)


def bitmap_bytes(units: int) -> int:
    """The size of a bitmap over so many units."""
    return (units + 7) // 8


def with_bits(bitmap: bytes, units: range) -> bytes:
    """`bitmap` with the bits of `units` set, made longer where they need it."""
    if not units:
        return bitmap
    size = max(len(bitmap), bitmap_bytes(units.stop))
    number = int.from_bytes(bitmap, "little") | ((1 << len(units)) - 1) << units.start
    return number.to_bytes(size, "little")


def count_bits(bitmap: bytes) -> int:
    """How many bits are set: counts are never stored beside what they count."""
    return int.from_bytes(bitmap, "little").bit_count()


def last_bit(bitmap: bytes) -> int:
    """The highest unit whose bit is set; -1 without any."""
    return int.from_bytes(bitmap, "little").bit_length() - 1


def rebuilt(cut: Cut, spans: Iterable[tuple[int, int, bool]]) -> tuple[bytes, bytes]:
    """The bitmaps `issued` and `done` that follow from leases: start, stop, whether they are done.

    A unit is done when its rows are, each once.
    """
    issued = done = bytes(bitmap_bytes(cut.units))
    rows: dict[int, int] = {}
    for start, stop, is_done in spans:
        touched = cut.touched(start, stop)
        issued = with_bits(issued, touched)
        for unit in touched if is_done else ():
            first, last = cut.span(unit)
            rows[unit] = rows.get(unit, 0) + min(stop, last) - max(start, first)
    for unit, count in rows.items():
        first, last = cut.span(unit)
        if count == last - first:
            done = with_bits(done, range(unit, unit + 1))
    return issued, done
