"""A first call of every loop with arrays of the types it is meant for: that compiles it."""

from collections.abc import Callable

import numpy as np

from atoll.compiled import loops
from atoll.compiled.arrays import AdamRates, Bytes, Floats, Halves

_SIZE = 16
_ONE = np.float32(1.0)


def _floats() -> Floats:
    return np.ones(_SIZE, np.float32)


def _halves() -> Halves:
    return np.zeros(_SIZE, np.uint16)


def _payload() -> Bytes:
    return np.zeros(_SIZE + 4, np.uint8)


RUNS: tuple[Callable[[], object], ...] = (
    lambda: loops.largest_bits(_floats()),
    lambda: loops.encode_int8(_floats(), _payload(), _SIZE),
    lambda: loops.decode_int8(_payload(), _floats(), _SIZE),
    lambda: loops.feed_int8(_floats(), _halves(), _payload(), _SIZE),
    lambda: loops.feed_bf16(_floats(), _halves(), _halves()),
    lambda: loops.publish_int8(_floats(), _floats(), _payload(), _SIZE),
    lambda: loops.publish_bf16(_floats(), _floats(), _halves()),
    lambda: loops.square_sum_int8(_payload(), _SIZE, _SIZE),
    lambda: loops.sgd(_floats(), _floats(), _ONE),
    lambda: loops.nesterov(_floats(), _floats(), _floats(), _ONE, _ONE),
    lambda: loops.adam(_floats(), _floats(), _floats(), _floats(), AdamRates(*[_ONE] * 7)),
)
