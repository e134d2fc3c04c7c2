"""The int4 codec's blocks in compiled loops; `codec` has the same in torch's steps."""

import numpy as np

from atoll.codecs import pieces
from atoll.codecs.blocks import SCALE_BYTES
from atoll.codecs.scaled import level, set_scale, weighed
from atoll.compiled.arrays import Bytes, Floats
from atoll.compiled.jit import loop

LEVELS = 7.0  # symmetric: -8 is never written
MAX_SCALE = float.fromhex("0x1.249248p+125")  # the fp32 maximum is 7 times it, exactly

_F, _I = np.float32, np.int32
_LEVELS, _MAX_SCALE, _MOST = _F(LEVELS), _F(MAX_SCALE), _I(LEVELS)
_ZERO, _FOUR, _EIGHT, _FIFTEEN = _F(0.0), _I(4), _I(8), _I(15)


@loop()
def _body_bytes(elements: int) -> int:
    return (elements + 1) // 2


@loop()
def _signed(nibble: np.int32) -> np.int32:
    """Two's complement of four bits."""
    return _I(_I(nibble ^ _EIGHT) - _EIGHT)


@loop()
def _pack(values: Floats, head: Bytes, body: Bytes) -> None:
    divisor = set_scale(values, head.view(np.float32), _LEVELS, _MAX_SCALE)
    if divisor == _ZERO:
        body[:] = np.uint8(0)
        return
    pairs = values.size // 2
    for i in range(pairs):
        low = _I(level(values[2 * i], divisor, _MOST) & _FIFTEEN)
        high = _I(level(values[2 * i + 1], divisor, _MOST) << _FOUR)
        body[i] = np.uint8(low | high)
    if pairs < body.size:
        body[pairs] = np.uint8(level(values[2 * pairs], divisor, _MOST) & _FIFTEEN)


@loop()
def _unpack(head: Bytes, body: Bytes, values: Floats) -> None:
    scale, pairs = head.view(np.float32)[0], values.size // 2
    for i in range(pairs):
        both = _I(body[i])
        values[2 * i] = _F(_signed(_I(both & _FIFTEEN))) * scale
        values[2 * i + 1] = _F(_signed(_I(both >> _FOUR))) * scale
    if pairs < body.size:
        values[2 * pairs] = _F(_signed(_I(body[pairs] & _FIFTEEN))) * scale


@loop()
def _squares(head: Bytes, body: Bytes, elements: int) -> float:
    """The bits behind an odd last level are 0, so a pair is as good as two."""
    squares, largest = _I(0), _I(0)
    for both in body[: (elements + 1) // 2]:
        low, high = _signed(_I(_I(both) & _FIFTEEN)), _signed(_I(_I(both) >> _FOUR))
        squares = _I(squares + _I(_I(low * low) + _I(high * high)))
        largest = max(largest, max(_I(abs(low)), _I(abs(high))))
    return weighed(head.view(np.float32)[0], squares, largest)


LOOPS = pieces.loops_of(
    head_bytes=SCALE_BYTES, body_bytes=_body_bytes, pack=_pack, unpack=_unpack, squares=_squares
)
