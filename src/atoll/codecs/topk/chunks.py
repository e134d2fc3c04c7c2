"""The bytes of topk's chunks, in numpy; `loops` has the same for one chunk at a time.

A chunk of n values (4096; the last one of a span may have fewer) keeps k = ceil(n / 64) of them, in
the order of their places. Its parts, each filled up with zeros to whole bytes, with bits counted
from the lowest of a byte:

    low     6 bits each   place mod 64
    high    2 k bits      bit place // 64 + i is set for the i-th: Elias-Fano coding
    values  2 bits each   1 for a magnitude above the mean; 1 for a value below 0
    magnitudes  2 bytes   codes of the means of those not above the mean and of those above

A chunk with a value that is not finite keeps it and has the first code 255. Where no magnitude is
above the mean (all are equal) the second code is 0.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.codecs import tree
from atoll.codecs.topk import magnitudes
from atoll.codecs.topk.magnitudes import LARGEST, NOT_FINITE, VALUES
from atoll.compiled.arrays import Bytes, Doubles, Floats, Integers
from atoll.compiled.bits import INFINITY_BITS

CHUNK = 4096
ROW = 64  # of so many values one is kept
_LOW_BITS, _VALUE_BITS, _MAGNITUDE_BYTES = 6, 2, 2
_MAGNITUDE = np.int32(0x7FFFFFFF)
ABOVE, NEGATIVE = 1, 2  # the bits of a value

# What is wrong with a chunk, by number; 0: nothing.
FAULTS = (
    "",
    "has bits set where none belong",
    "does not name as many places as it keeps",
    "names places that do not ascend",
    "names a place beyond its last value",
    "has magnitudes that no encoder writes",
)
STRAY, COUNT, ORDER, RANGE, MAGNITUDES = range(1, len(FAULTS))


def num_kept(elements: int) -> int:
    """How many values a chunk of so many elements keeps."""
    return -(-elements // ROW)


def chunk_bytes(elements: int) -> int:
    """The bytes of a chunk of so many elements: 82 for a full one."""
    low, high, values = _part_bytes(num_kept(elements))
    return low + high + values + _MAGNITUDE_BYTES if elements else 0


def _part_bytes(kept: int) -> tuple[int, int, int]:
    """Bytes of the low bits, of the high bits and of the values."""
    return -(-kept * _LOW_BITS // 8), -(-kept * 2 // 8), -(-kept * _VALUE_BITS // 8)


def pack(values: Floats) -> Bytes:
    """The bytes [chunks, chunk_bytes(n)] of chunks of one size, fp32 [chunks, n]."""
    places = _largest(values)  # [chunks, k]
    sent = np.take_along_axis(values, places, axis=1)
    above, codes = _levels(sent)
    high = np.zeros((len(values), 2 * places.shape[1]), np.bool_)
    np.put_along_axis(high, (places >> _LOW_BITS) + np.arange(places.shape[1]), True, axis=1)
    parts = [_bits(places, _LOW_BITS), high, _bits(above + NEGATIVE * (sent < 0), _VALUE_BITS)]
    return np.hstack([*(np.packbits(part, axis=1, bitorder="little") for part in parts), codes])


def _largest(values: Floats) -> Integers:
    """Places [chunks, k] of the largest magnitudes, ascending; of equal ones the first."""
    elements = values.shape[1]
    first = elements - num_kept(elements)
    # Keys are all different, so no order that the library may choose matters: magnitudes by their
    # bits, which order NaN above infinity above all, then the earlier place.
    bits = (values.view(np.int32) & _MAGNITUDE).astype(np.int64)
    keys = bits * CHUNK + (CHUNK - 1 - np.arange(elements))
    found = np.partition(keys, first, axis=1)[:, first:] % CHUNK
    return np.sort(CHUNK - 1 - found, axis=1)


def _levels(sent: Floats) -> tuple[NDArray[np.bool_], Bytes]:
    """Which of the kept values [chunks, k] are above their mean, and both codes [chunks, 2]."""
    sizes = np.abs(sent).astype(np.float64)
    damaged = (sent.view(np.int32) & _MAGNITUDE).max(axis=1) >= INFINITY_BITS
    sizes[damaged] = 0.0
    above = sizes > (_sum(sizes) / sizes.shape[1])[:, None]
    many = np.count_nonzero(above, axis=1)
    codes = np.empty((len(sent), 2), np.uint8)
    codes[:, 0] = magnitudes.codes(_sum(np.where(above, 0.0, sizes)) / (sizes.shape[1] - many))
    codes[:, 1] = magnitudes.codes(_sum(np.where(above, sizes, 0.0)) / np.maximum(many, 1))
    codes[damaged, 0] = NOT_FINITE
    return above, codes


def _sum(terms: Doubles) -> Doubles:
    """Sums of rows, by the tree of adds."""
    filled = np.zeros((len(terms), ROW))
    filled[:, : terms.shape[1]] = terms
    sums: Doubles = tree.total(torch.from_numpy(filled)).numpy()
    return sums


def _bits(numbers: Integers, width: int) -> Integers:
    """The lowest `width` bits of numbers [chunks, k], lowest first: [chunks, k * width]."""
    return (numbers[:, :, None] >> np.arange(width) & 1).reshape(len(numbers), -1)


def _numbers(bits: Bytes, width: int) -> Integers:
    """The other way: [chunks, k * width] -> [chunks, k]."""
    digits = bits.reshape(len(bits), -1, width).astype(np.int64)
    numbers: Integers = (digits << np.arange(width)).sum(axis=2)
    return numbers


class Chunks:
    """Chunks of one size taken apart: places and values as numbers, nothing judged yet."""

    def __init__(self, rows: Bytes, elements: int) -> None:
        kept = num_kept(elements)
        cuts = np.cumsum(_part_bytes(kept))
        low, high, values = (
            np.unpackbits(part, axis=1, bitorder="little")
            for part in np.split(rows[:, :-_MAGNITUDE_BYTES], cuts[:-1], axis=1)
        )
        widths = (_LOW_BITS * kept, 2 * kept, _VALUE_BITS * kept)
        parts = zip((low, high, values), widths, strict=True)
        self.stray = np.logical_or.reduce([part[:, width:].any(axis=1) for part, width in parts])
        self.elements = elements
        self.kept = kept
        self.low = _numbers(low[:, : widths[0]], _LOW_BITS)  # [chunks, k]
        self.high = high[:, : widths[1]]  # [chunks, 2 k], bits
        self.values = _numbers(values[:, : widths[2]], _VALUE_BITS)  # [chunks, k]
        self.codes = rows[:, -_MAGNITUDE_BYTES:].astype(np.int64)  # [chunks, 2]

    def faults(self) -> Integers:
        """What is wrong with each chunk [chunks]; of several things the first of `FAULTS`."""
        found = np.where(self._is_coded(), 0, MAGNITUDES)
        counted = self.high.sum(axis=1) == self.kept
        whole = np.flatnonzero(counted)  # only these have places to look at
        places = self._places(whole)
        found[whole[(places >= self.elements).any(axis=1)]] = RANGE
        found[whole[(np.diff(places, axis=1) <= 0).any(axis=1)]] = ORDER
        found[~counted] = COUNT
        found[self.stray] = STRAY
        return found

    def _is_coded(self) -> NDArray[np.bool_]:
        """Whether the two codes are such as `pack` writes, for what the values say."""
        first, second = self.codes.T
        has_above = (self.values & ABOVE).any(axis=1)
        ordered = (np.maximum(first, 1) <= second) & (second <= LARGEST)
        alone = (second == 0) & ((first <= LARGEST) | (first == NOT_FINITE))
        coded: NDArray[np.bool_] = np.where(has_above, ordered, alone)
        return coded

    def places(self) -> Integers:
        """Places [chunks, k] in their chunks, which have no fault; ascending."""
        return self._places(np.arange(len(self.low)))

    def _places(self, chosen: Integers) -> Integers:
        """Places [chosen, k] of chunks whose high bits are as many as they keep."""
        set_bits = np.nonzero(self.high[chosen])[1].reshape(len(chosen), self.kept)
        return ((set_bits - np.arange(self.kept)) << _LOW_BITS) + self.low[chosen]

    def unpack(self, values: Floats) -> None:
        """Writes chunks without a fault into `values` [chunks, n]."""
        found = np.take_along_axis(VALUES[self.codes], self.values & ABOVE, axis=1)
        values[:] = 0.0
        signed = np.where(self.values & NEGATIVE, -found, found)
        np.put_along_axis(values, self.places(), signed, axis=1)
