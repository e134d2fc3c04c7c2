"""Norm and finite check of values in one pass."""

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.layout import GROUP_ELEMENTS


def square_sum(values: Tensor, *, total: float = 0.0) -> float:
    """`total` plus the sum of squares in fp64: NaN or infinite exactly when a value is not finite.

    fp32 squares are exact in fp64 and cannot overflow it. Pass the result of one tile as the
    `total` of the next: the groups are then added in the same order whatever the tile size. Within
    a group the machine's BLAS orders the terms, so the last digits are its own; no bit of a model
    depends on them. Raises nothing.
    """
    buffers.check_values(values)
    scratch = torch.empty(min(values.numel(), GROUP_ELEMENTS), dtype=torch.float64)
    for _, span in buffers.groups(values.numel()):
        group = scratch[: len(span)].copy_(values[span.start : span.stop])
        total += float(torch.dot(group, group))
    return total
