"""The int8 codec's work on a large tile in one pass; `codec` has the same in torch's steps.

Both take the format's numbers from here. Arrays of one call are flat, contiguous, aligned and do
not overlap.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.compiled.arrays import BYTES, FLOATS, HALVES, INTEGER, Bytes, Floats, Halves
from atoll.compiled.bits import INFINITY_BITS, largest_bits, nearest, widened
from atoll.compiled.jit import loop
from atoll.layout import GROUP_ELEMENTS

SCALE_BYTES = 4
LEVELS = 127.0  # symmetric: -128 is never written
# The largest fp32 whose product with 127 is finite; the scale of an absmax near the fp32 maximum
# would round past it.
MAX_SCALE = float.fromhex("0x1.020406p+121")

_F, _I, _U = np.float32, np.int32, np.uint32
_INFINITY = _I(INFINITY_BITS)
_NAN, _ZERO, _ONE = _F(np.nan), _F(0.0), _F(1.0)
_LEVELS, _MAX_SCALE = _F(LEVELS), _F(MAX_SCALE)
_MAX_LEVEL, _MIN_LEVEL = _I(LEVELS), _I(-LEVELS)
# 1.5 * 2^23: what is below 2^22 becomes an integer when this is added, ties to even.
_ROUNDER = _F(12582912.0)


@loop()
def _quantize(values: Floats, scales: Floats, index: int, levels: NDArray[np.int8]) -> None:
    """One block, [block] or shorter: its scale goes to `scales[index]`."""
    largest = largest_bits(values)
    if largest >= _INFINITY:
        scales[index] = _NAN  # decodes to NaN whole, so nobody takes the block for sound
        for i in range(levels.size):
            levels[i] = np.int8(0)
        return
    scales.view(np.int32)[index] = largest  # these bits are the largest magnitude
    scale = scales[index] / _LEVELS
    scale = _MAX_SCALE if scale > _MAX_SCALE else scale
    scales[index] = scale
    # A tiny absmax may round to scale 0 too; dividing by 1 gives level 0, never 0 / 0.
    divisor = _ONE if scale == _ZERO else scale
    for i in range(levels.size):
        level = _I((values[i] / divisor + _ROUNDER) - _ROUNDER)
        # The rounding of a subnormal or clamped scale can push a quotient past 127.
        level = _MAX_LEVEL if level > _MAX_LEVEL else level
        level = _MIN_LEVEL if level < _MIN_LEVEL else level
        levels[i] = np.int8(level)


@loop()
def _group(
    payload: Bytes, start: int, elements: int, block: int
) -> tuple[Floats, NDArray[np.int8]]:
    """Scales and levels, as views, of the group that begins with element `start` of `elements`."""
    size = min(GROUP_ELEMENTS, elements - start)
    first = start + SCALE_BYTES * (start // block)  # only the last group has a short block
    cut = first + SCALE_BYTES * ((size + block - 1) // block)
    return payload[first:cut].view(np.float32), payload[cut : cut + size].view(np.int8)


@loop(FLOATS, BYTES, INTEGER)
def encode(values: Floats, payload: Bytes, block: int) -> None:
    """Group by group: scales, then levels."""
    for start in range(0, values.size, GROUP_ELEMENTS):
        group = values[start : start + GROUP_ELEMENTS]
        scales, levels = _group(payload, start, values.size, block)
        for b in range(scales.size):
            place = slice(b * block, (b + 1) * block)
            _quantize(group[place], scales, b, levels[place])


@loop(BYTES, FLOATS, INTEGER)
def decode(payload: Bytes, values: Floats, block: int) -> None:
    """level * scale."""
    for start in range(0, values.size, GROUP_ELEMENTS):
        group = values[start : start + GROUP_ELEMENTS]
        scales, levels = _group(payload, start, values.size, block)
        for b in range(scales.size):
            out = group[b * block : (b + 1) * block]
            given = levels[b * block : (b + 1) * block]
            scale = scales[b]
            for i in range(out.size):
                out[i] = _F(given[i]) * scale


@loop(FLOATS, HALVES, BYTES, INTEGER)
def feed(values: Floats, residual: Halves, payload: Bytes, block: int) -> None:
    """v = values + residual; residual = bf16(v - decode(encode(v)))."""
    wanted = np.empty(block, np.float32)  # one block: encoded and decoded while it is in cache
    for start in range(0, values.size, GROUP_ELEMENTS):
        scales, levels = _group(payload, start, values.size, block)
        for b in range(scales.size):
            sent = levels[b * block : (b + 1) * block]
            first = start + b * block
            new = values[first : first + sent.size]
            kept = residual[first : first + sent.size]
            for i in range(sent.size):
                wanted[i] = widened(_U(kept[i])) + new[i]
            _quantize(wanted[: sent.size], scales, b, sent)
            scale = scales[b]
            for i in range(sent.size):
                kept[i] = np.uint16(nearest(wanted[i] - _F(sent[i]) * scale))


@loop(FLOATS, FLOATS, BYTES, INTEGER)
def publish(master: Floats, published: Floats, payload: Bytes, block: int) -> None:
    """published += decode(encode(master - published))."""
    wanted = np.empty(block, np.float32)
    for start in range(0, master.size, GROUP_ELEMENTS):
        scales, levels = _group(payload, start, master.size, block)
        for b in range(scales.size):
            sent = levels[b * block : (b + 1) * block]
            first = start + b * block
            true = master[first : first + sent.size]
            known = published[first : first + sent.size]
            for i in range(sent.size):
                wanted[i] = true[i] - known[i]
            _quantize(wanted[: sent.size], scales, b, sent)
            scale = scales[b]
            for i in range(sent.size):
                known[i] = known[i] + _F(sent[i]) * scale


@loop(BYTES, INTEGER, INTEGER)
def square_sum(payload: Bytes, elements: int, block: int) -> float:
    """`codecs.finite` of what the payload decodes to: levels squared and summed as integers."""
    total = 0.0
    for start in range(0, elements, GROUP_ELEMENTS):
        scales, levels = _group(payload, start, elements, block)
        for b in range(scales.size):
            squares, largest = _I(0), _I(0)
            for level in levels[b * block : (b + 1) * block]:
                squares = _I(squares + _I(_I(level) * _I(level)))  # at most 2^16 of 2^14
                largest = max(largest, _I(abs(_I(level))))
            # As fp32 the largest value may be infinite where the scale is not.
            is_sound = np.isfinite(scales[b] * _F(largest))
            scale = np.float64(scales[b]) if is_sound else np.inf
            total += scale * scale * np.float64(squares)
    return total
