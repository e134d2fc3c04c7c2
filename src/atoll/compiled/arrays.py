"""What loops work on: flat arrays over the memory of tiles and payloads; and their settings."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]  # the bits of bf16


class AdamRates(NamedTuple):
    """What one step of `optim.adam` multiplies and divides by."""

    beta1: np.float32
    beta2: np.float32
    rest1: np.float32  # 1 - beta1
    rest2: np.float32
    step_size: np.float32
    root_correction: np.float32
    eps: np.float32
