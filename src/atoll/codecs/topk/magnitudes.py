"""A magnitude in one byte: eight steps an octave where displacements are, coarse beyond.

    0          0
    1 to 14    2^-149, then 2^-139 and every ninth power of two up to 2^-31; rounded down
    15 to 238  m / 8 * 2^e, m = 8 to 15, e = -22 to 5; the nearest, the larger of two as near
    239 to 252 2^6 and every ninth power of two up to 2^123; rounded down
    255        not finite

No byte has another meaning; 253 and 254 are not written. Beyond the fine steps rounding goes down,
so that no more is sent than there is and the rest stays in the residual.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atoll.compiled.arrays import Doubles, Floats
from atoll.compiled.jit import loop

_TINY = [2.0**-149, *(2.0**e for e in range(-139, -22, 9))]
_FINE = [m / 8 * 2.0**e for e in range(-22, 6) for m in range(8, 16)]
_HUGE = [2.0**e for e in range(6, 128, 9)]
MAGNITUDES = [*_TINY, *_FINE, *_HUGE]

LARGEST = len(MAGNITUDES)  # the code of the largest one
NOT_FINITE = 255
# What a code decodes to, exactly; codes that are not written decode to NaN.
VALUES: Floats = np.full(256, np.nan, np.float32)
VALUES[: LARGEST + 1] = [0.0, *MAGNITUDES]
# LIMITS[c - 1] is the smallest magnitude with code c: of a fine step half way to the one before.
_MIDDLES = [(a + b) / 2 for a, b in pairwise(_FINE)]
LIMITS: Doubles = np.array([*_TINY, _FINE[0], *_MIDDLES, *_HUGE])


def codes(means: Doubles) -> NDArray[np.uint8]:
    """The codes of finite magnitudes."""
    return np.searchsorted(LIMITS, means, side="right").astype(np.uint8)


@loop()
def code(mean: float) -> int:
    """The code of one."""
    found = 0
    for limit in LIMITS:
        found += 1 if limit <= mean else 0
    return found
