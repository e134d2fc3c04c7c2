"""What loops work on: flat arrays over the memory of tiles and payloads.

The capital names are examples, empty arrays that say a loop's types: see `compiled.jit`.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]  # the bits of bf16
Words = NDArray[np.uint32]
Doubles = NDArray[np.float64]
Places = NDArray[np.int32]
Integers = NDArray[np.int64]

FLOATS: Floats = np.empty(0, np.float32)
BYTES: Bytes = np.empty(0, np.uint8)
HALVES: Halves = np.empty(0, np.uint16)
DOUBLES: Doubles = np.empty(0, np.float64)
PLACES: Places = np.empty(0, np.int32)
INTEGERS: Integers = np.empty(0, np.int64)
PAIRS: Words = np.empty((0, 2), np.uint32)  # one pair a row
NUMBER = np.float32(0.0)
INTEGER = 0
