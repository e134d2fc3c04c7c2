"""What loops work on: flat arrays over the memory of tiles and payloads."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]  # the bits of bf16
