"""The bf16 codec's work on a large tile in one pass, rounded to nearest.

Arrays of one call have one length, are flat, contiguous and aligned and do not overlap.
"""

import numpy as np

from atoll.compiled.arrays import FLOATS, HALVES, NUMBER, Floats, Halves
from atoll.compiled.bits import carried, nearest, widened
from atoll.compiled.jit import loop


@loop(FLOATS, HALVES, HALVES, NUMBER)
def feed(values: Floats, residual: Halves, payload: Halves, decay: np.float32) -> None:
    """v = values + decay * residual; residual = bf16(v - decode(encode(v)))."""
    for i in range(values.size):
        wanted = carried(residual[i], decay) + values[i]
        half = nearest(wanted)
        payload[i] = np.uint16(half)
        residual[i] = np.uint16(nearest(wanted - widened(half)))


@loop(FLOATS, FLOATS, HALVES)
def publish(master: Floats, published: Floats, payload: Halves) -> None:
    """published += decode(encode(master - published))."""
    for i in range(master.size):
        half = nearest(master[i] - published[i])
        payload[i] = np.uint16(half)
        published[i] = published[i] + widened(half)
