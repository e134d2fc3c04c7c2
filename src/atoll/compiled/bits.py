"""Bit patterns of fp32 and bf16, and the loops over them that others are made of."""

import numpy as np

from atoll.compiled.arrays import FLOATS, Floats
from atoll.compiled.jit import loop

INFINITY_BITS = 0x7F800000  # of fp32; what is above it, without the sign, is NaN

_F, _I, _U = np.float32, np.int32, np.uint32
_MAGNITUDE = _I(0x7FFFFFFF)  # all but the sign


@loop(FLOATS)
def largest_bits(values: Floats) -> np.int32:
    """The largest bit pattern of `values` [n], signs off; INFINITY_BITS or more if not finite."""
    bits = values.view(np.int32)
    largest = _I(0)
    for i in range(bits.size):
        # Without the sign, patterns are ordered as the values are: NaN above infinity above all.
        magnitude = _I(bits[i] & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@loop()
def widened(half: np.uint32) -> np.float32:
    """The value of the bf16 with these bits."""
    return _U(half << _U(16)).view(np.float32)


@loop()
def carried(half: np.uint16, decay: np.float32) -> np.float32:
    """What error feedback adds of a residual (bf16): a `decay` of 1 leaves every bit as it is."""
    return widened(_U(half)) * decay


@loop()
def nearest(value: np.float32) -> np.uint32:
    """The bits of the nearest bf16, ties to even; of a NaN those of a quiet one."""
    bits = _F(value).view(np.uint32)
    # Half a unit less one, and one more where the upper half is odd: a tie goes to the even one.
    odd = _U(_U(bits >> _U(16)) & _U(1))
    rounded = _U(_U(_U(bits + _U(0x7FFF)) + odd) >> _U(16))
    # A NaN whose mantissa is in the lower half alone would come out as infinity.
    is_nan = _U(bits & _U(0x7FFFFFFF)) > _U(INFINITY_BITS)
    return _U(0x7FC0) if is_nan else rounded
