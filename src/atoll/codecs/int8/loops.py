"""The int8 codec's blocks in compiled loops; `codec` has the same in torch's steps."""

import numpy as np

from atoll.codecs import pieces
from atoll.codecs.blocks import SCALE_BYTES
from atoll.codecs.scaled import draw_of, drawn_level, level, set_scale, weighed
from atoll.compiled.arrays import Bytes, Floats
from atoll.compiled.jit import loop

LEVELS = 127.0  # symmetric: -128 is never written
# The scale of an absmax near the fp32 maximum would round past it.
MAX_SCALE = float.fromhex("0x1.020406p+121")

_F, _I, _U = np.float32, np.int32, np.uint32
_LEVELS, _MAX_SCALE, _MOST = _F(LEVELS), _F(MAX_SCALE), _I(LEVELS)
_ZERO = _F(0.0)


@loop()
def _body_bytes(elements: int) -> int:
    return elements


@loop()
def _pack(values: Floats, head: Bytes, body: Bytes) -> None:
    levels = body.view(np.int8)
    divisor = set_scale(values, head.view(np.float32), _LEVELS, _MAX_SCALE)
    if divisor == _ZERO:
        levels[:] = np.int8(0)
        return
    for i in range(levels.size):
        levels[i] = np.int8(level(values[i], divisor, _MOST))


@loop()
def _pack_drawn(
    values: Floats, head: Bytes, body: Bytes, index: int, first: np.uint32, second: np.uint32
) -> None:
    levels = body.view(np.int8)
    divisor = set_scale(values, head.view(np.float32), _LEVELS, _MAX_SCALE)
    if divisor == _ZERO:
        levels[:] = np.int8(0)
        return
    start = _U(_U(index) + first)
    for i in range(values.size):
        draw = draw_of(_U(_U(i) + start), second)
        levels[i] = np.int8(_I(drawn_level(values[i], divisor, _LEVELS, draw)))


@loop()
def _unpack(head: Bytes, body: Bytes, values: Floats) -> None:
    levels, scale = body.view(np.int8), head.view(np.float32)[0]
    for i in range(values.size):
        values[i] = _F(levels[i]) * scale


@loop()
def _squares(head: Bytes, body: Bytes, elements: int) -> float:
    squares, largest = _I(0), _I(0)
    for found in body.view(np.int8)[:elements]:
        wide = _I(found)
        squares = _I(squares + _I(wide * wide))  # at most 2^16 of 2^14
        largest = max(largest, _I(abs(wide)))
    return weighed(head.view(np.float32)[0], squares, largest)


LOOPS = pieces.loops_of(
    head_bytes=SCALE_BYTES,
    body_bytes=_body_bytes,
    pack=_pack,
    unpack=_unpack,
    squares=_squares,
    pack_drawn=_pack_drawn,
)
