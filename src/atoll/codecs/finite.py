"""Norm and finite check of values in one pass."""

import math

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.compiled.base import loops_for
from atoll.compiled.numbers import INFINITY_BITS
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
    quick = float(torch.dot(values, values))
    return quick if _EASY_MIN <= quick <= _EASY_MAX else _square_sum_with_care(values)


def first_not_finite(values: Tensor) -> int | None:
    """Where the first NaN or infinity stands; None when all is finite.

    One pass where all is well; without a loop that of a dot product, since a finite sum of squares
    has no such term.
    """
    loops = loops_for(values.numel())
    if loops is not None:
        if loops.largest_bits(values.numpy()) < INFINITY_BITS:
            return None
    elif math.isfinite(float(torch.dot(values, values))):
        return None
    bad = torch.isfinite(values).logical_not_()  # finite values may overflow when squared
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
