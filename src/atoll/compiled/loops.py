"""The loops; what each computes is said by the part that it is the fast way of.

Bodies are in numba's language: plain loops over slices, which its compiler turns into vector
instructions. Every constant is fp32 or an integer, or sums would be taken in fp64.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.compiled import numbers
from atoll.compiled.arrays import AdamRates, Bytes, Floats, Halves
from atoll.compiled.jit import loop
from atoll.layout import GROUP_ELEMENTS

_F, _I, _U = np.float32, np.int32, np.uint32
_SCALE_BYTES = numbers.SCALE_BYTES
_MAGNITUDE, _INFINITY = _I(0x7FFFFFFF), _I(numbers.INFINITY_BITS)
_NAN, _ZERO, _ONE = _F(np.nan), _F(0.0), _F(1.0)
_LEVELS = _F(numbers.LEVELS)
_MAX_LEVEL, _MIN_LEVEL = _I(numbers.LEVELS), _I(-numbers.LEVELS)
_MAX_SCALE = _F(numbers.MAX_SCALE)
# 1.5 * 2^23: what is below 2^22 becomes an integer when this is added, ties to even.
_ROUNDER = _F(12582912.0)


@loop
def largest_bits(values: Floats) -> np.int32:
    """NaN above infinity above every number."""
    bits = values.view(np.int32)
    largest = _I(0)
    for i in range(bits.size):
        magnitude = _I(bits[i] & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@loop
def _quantize(values: Floats, scales: Floats, index: int, levels: NDArray[np.int8]) -> None:
    """One block: its scale goes to `scales[index]`."""
    largest = largest_bits(values)
    if largest >= _INFINITY:
        scales[index] = _NAN
        for i in range(levels.size):
            levels[i] = np.int8(0)
        return
    scales.view(np.int32)[index] = largest  # these bits are the largest magnitude
    scale = scales[index] / _LEVELS
    scale = _MAX_SCALE if scale > _MAX_SCALE else scale
    scales[index] = scale
    divisor = _ONE if scale == _ZERO else scale
    for i in range(levels.size):
        level = _I((values[i] / divisor + _ROUNDER) - _ROUNDER)
        level = _MAX_LEVEL if level > _MAX_LEVEL else level
        level = _MIN_LEVEL if level < _MIN_LEVEL else level
        levels[i] = np.int8(level)


@loop
def _group(
    payload: Bytes, start: int, elements: int, block: int
) -> tuple[Floats, NDArray[np.int8]]:
    """Scales and levels, as views, of the group that begins with element `start` of `elements`."""
    size = min(GROUP_ELEMENTS, elements - start)
    first = start + _SCALE_BYTES * (start // block)  # only the last group has a short block
    cut = first + _SCALE_BYTES * ((size + block - 1) // block)
    return payload[first:cut].view(np.float32), payload[cut : cut + size].view(np.int8)


@loop
def encode_int8(values: Floats, payload: Bytes, block: int) -> None:
    """Group by group: scales, then levels."""
    for start in range(0, values.size, GROUP_ELEMENTS):
        group = values[start : start + GROUP_ELEMENTS]
        scales, levels = _group(payload, start, values.size, block)
        for b in range(scales.size):
            place = slice(b * block, (b + 1) * block)
            _quantize(group[place], scales, b, levels[place])


@loop
def decode_int8(payload: Bytes, values: Floats, block: int) -> None:
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


@loop
def _widened(half: np.uint32) -> np.float32:
    """The value of the bf16 with these bits."""
    return _U(half << _U(16)).view(np.float32)


@loop
def _nearest(value: np.float32) -> np.uint32:
    """The bits of the nearest bf16, ties to even; of a NaN those of a quiet one."""
    bits = _F(value).view(np.uint32)
    odd = _U(_U(bits >> _U(16)) & _U(1))
    rounded = _U(_U(_U(bits + _U(0x7FFF)) + odd) >> _U(16))
    is_nan = _U(bits & _U(0x7FFFFFFF)) > _U(0x7F800000)
    return _U(0x7FC0) if is_nan else rounded


@loop
def feed_int8(values: Floats, residual: Halves, payload: Bytes, block: int) -> None:
    """v = values + residual; residual = bf16(v - decode(encode(v)))."""
    wanted = np.empty(block, np.float32)
    for start in range(0, values.size, GROUP_ELEMENTS):
        scales, levels = _group(payload, start, values.size, block)
        for b in range(scales.size):
            sent = levels[b * block : (b + 1) * block]
            first = start + b * block
            new = values[first : first + sent.size]
            kept = residual[first : first + sent.size]
            for i in range(sent.size):
                wanted[i] = _widened(_U(kept[i])) + new[i]
            _quantize(wanted[: sent.size], scales, b, sent)
            scale = scales[b]
            for i in range(sent.size):
                kept[i] = np.uint16(_nearest(wanted[i] - _F(sent[i]) * scale))


@loop
def feed_bf16(values: Floats, residual: Halves, payload: Halves) -> None:
    """The same."""
    for i in range(values.size):
        wanted = _widened(_U(residual[i])) + values[i]
        half = _nearest(wanted)
        payload[i] = np.uint16(half)
        residual[i] = np.uint16(_nearest(wanted - _widened(half)))


@loop
def publish_int8(master: Floats, published: Floats, payload: Bytes, block: int) -> None:
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


@loop
def publish_bf16(master: Floats, published: Floats, payload: Halves) -> None:
    """The same."""
    for i in range(master.size):
        half = _nearest(master[i] - published[i])
        payload[i] = np.uint16(half)
        published[i] = published[i] + _widened(half)


@loop
def square_sum_int8(payload: Bytes, elements: int, block: int) -> float:
    """Levels are squared and summed as integers, exactly."""
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


@loop
def sgd(params: Floats, gradient: Floats, lr: np.float32) -> None:
    """p - lr*g."""
    for i in range(params.size):
        params[i] = params[i] - gradient[i] * lr


@loop
def nesterov(
    params: Floats, gradient: Floats, momentum: Floats, lr: np.float32, decay: np.float32
) -> None:
    """m = decay*m + g, p - lr*(g + decay*m)."""
    for i in range(params.size):
        moved = momentum[i] * decay + gradient[i]
        momentum[i] = moved
        params[i] = params[i] - (gradient[i] + moved * decay) * lr


@loop
def adam(params: Floats, gradient: Floats, first: Floats, second: Floats, rates: AdamRates) -> None:
    """The rule of `optim.adam`."""
    for i in range(params.size):
        g = gradient[i]
        m = first[i] * rates.beta1 + g * rates.rest1
        v = second[i] * rates.beta2 + g * g * rates.rest2
        first[i] = m
        second[i] = v
        divisor = np.sqrt(v) / rates.root_correction + rates.eps
        params[i] = params[i] - m * rates.step_size / divisor
