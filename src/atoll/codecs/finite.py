"""Squared norm of a tile, and whether all of its values are finite, in one pass over it."""

import math

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.compiled.base import compiled
from atoll.compiled.bits import INFINITY_BITS, largest_bits
from atoll.layout import GROUP_ELEMENTS

# Between these a sum of fp32 squares neither overflowed nor lost a share that could be seen.
_EASY_MIN = 2.0**-80
_EASY_MAX = 2.0**120


def square_sum(values: Tensor) -> float:
    """The sum of squares: NaN or infinite exactly when a value is not finite.

    Correct to some 1e-6 of itself. The machine's BLAS orders the terms, so the last digits are its
    own; no bit of a model depends on them. Raises nothing.
    """
    buffers.check_values(values)
    # One pass of BLAS. Outside the easy range the fp32 squares may have overflowed or vanished.
    quick = float(torch.dot(values, values))
    return quick if _EASY_MIN <= quick <= _EASY_MAX else _square_sum_with_care(values)


def first_not_finite(values: Tensor) -> int | None:
    """Where the first NaN or infinity stands; None when all is finite.

    Costs one pass over the values as long as all is well.
    """
    if compiled.ready(values.numel()):
        if largest_bits(values.numpy()) < INFINITY_BITS:
            return None
    elif math.isfinite(float(torch.dot(values, values))):
        return None  # a sum of squares with NaN or infinity in it is not finite
    # Reached without a fault too: finite values may overflow when they are squared.
    bad = torch.isfinite(values).logical_not_()
    return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else None


def _square_sum_with_care(values: Tensor) -> float:
    """In fp64, where fp32 squares are exact and cannot overflow; group by group, to stay small."""
    total = 0.0
    scratch = torch.empty(min(values.numel(), GROUP_ELEMENTS), dtype=torch.float64)
    for _, span in buffers.groups(values.numel()):
        group = scratch[: len(span)].copy_(values[span.start : span.stop])
        total += float(torch.dot(group, group))
        if not math.isfinite(total):
            break
    return total
