"""Norm and finite check of values in one pass."""

import math

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.layout import GROUP_ELEMENTS

_COLUMNS = 256


def square_sum(values: Tensor, *, total: float = 0.0) -> float:
    """`total` plus the sum of squares in fp64: NaN or infinite exactly when a value is not finite.

    Pass the result of one tile as the `total` of the next: the groups are then added in the same
    order whatever the tile size, and the bits are the same on every machine. Raises nothing.
    """
    buffers.check_values(values)
    scratch = torch.zeros(GROUP_ELEMENTS, dtype=torch.float64)
    for _, span in buffers.groups(values.numel()):
        scratch[: len(span)].copy_(values[span.start : span.stop])
        scratch[len(span) :].zero_()
        # fp32 squares are exact in fp64 and cannot overflow it. numpy adds row to row in order and
        # fsum rounds once; torch's own sum orders its terms by the machine's vector width.
        squares = scratch.mul_(scratch).view(-1, _COLUMNS).numpy()
        total += math.fsum(np.add.reduce(squares, axis=0).tolist())
    return total
