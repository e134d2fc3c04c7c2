"""The sign codec's blocks in compiled loops; `codec` has the same in torch's steps."""

import numpy as np

from atoll.codecs import pieces
from atoll.codecs.blocks import SCALE_BYTES
from atoll.codecs.tree import halve
from atoll.compiled.arrays import Bytes, Floats
from atoll.compiled.bits import INFINITY_BITS, largest_bits
from atoll.compiled.jit import loop

_F, _I, _U = np.float32, np.int32, np.uint32
_INFINITY = _I(INFINITY_BITS)
_NAN, _ZERO = _F(np.nan), _F(0.0)
_ONE, _MINUS = _U(1), _U(31)  # a bit; how far it goes to be the sign of fp32


@loop()
def _body_bytes(elements: int) -> int:
    return (elements + 7) // 8


@loop()
def _mean(values: Floats) -> np.float32:
    """The mean magnitude, as `codecs.tree` sums it: zeros fill up to a power of two."""
    width = 1
    while width < values.size:
        width *= 2
    terms = np.zeros(width, np.float64)
    for i in range(values.size):
        terms[i] = np.float64(abs(values[i]))
    return _F(halve(terms) / np.float64(values.size))


@loop()
def _pack(values: Floats, head: Bytes, body: Bytes) -> None:
    is_sound = largest_bits(values) < _INFINITY
    head.view(np.float32)[0] = _mean(values) if is_sound else _NAN
    for j in range(body.size):
        byte = _U(0)
        for i in range(min(8, values.size - 8 * j)):
            is_negative = is_sound and values[8 * j + i] < _ZERO
            byte |= _U(_U(is_negative) << _U(i))
        body[j] = np.uint8(byte)


@loop()
def _unpack(head: Bytes, body: Bytes, values: Floats) -> None:
    scale = head.view(np.uint32)[0]
    bits = values.view(np.uint32)
    for i in range(values.size):
        flipped = _U(_U(_U(body[i // 8]) >> _U(i % 8)) & _ONE)
        bits[i] = scale ^ _U(flipped << _MINUS)


@loop()
def _squares(head: Bytes, _body: Bytes, elements: int) -> float:
    scale = np.float64(head.view(np.float32)[0])
    return scale * scale * np.float64(elements)


LOOPS = pieces.loops_of(
    head_bytes=SCALE_BYTES, body_bytes=_body_bytes, pack=_pack, unpack=_unpack, squares=_squares
)
