"""Outer Adam (arXiv:1412.6980), as `torch.optim.Adam` without weight decay and amsgrad."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.compiled.arrays import FLOATS, NUMBER, Floats
from atoll.compiled.jit import loop
from atoll.optim.base import OuterOptimizer


class _Rates(NamedTuple):
    """What one step multiplies and divides by."""

    beta1: np.float32
    beta2: np.float32
    rest1: np.float32  # 1 - beta1
    rest2: np.float32
    step_size: np.float32
    root_correction: np.float32
    eps: np.float32


@loop(FLOATS, FLOATS, FLOATS, FLOATS, _Rates(*[NUMBER] * 7))
def _loop(params: Floats, gradient: Floats, first: Floats, second: Floats, rates: _Rates) -> None:
    """One pass over a tile, all [n]; the order of operations is that of the steps below."""
    for i in range(params.size):
        g = gradient[i]
        m = first[i] * rates.beta1 + g * rates.rest1
        v = second[i] * rates.beta2 + g * g * rates.rest2
        first[i] = m
        second[i] = v
        divisor = np.sqrt(v) / rates.root_correction + rates.eps
        params[i] = params[i] - m * rates.step_size / divisor


@dataclass(frozen=True, slots=True)
class Adam(OuterOptimizer):
    """The rule of `torch.optim.Adam`, one rounding per operation.

    m = beta1*m + (1 - beta1)*g
    v = beta2*v + (1 - beta2)*(g*g)
    p = p - lr/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps)

    Deviation: torch updates m with `lerp` and v with `addcmul`, whose bits depend on the CPU.
    """

    name: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    lr: float
    beta1: float
    _: KW_ONLY
    beta2: float
    eps: float

    def run_loop(self, tiles: Sequence[Floats], *, step: int) -> None:
        params, gradient, first, second = tiles
        rest1, rest2, corrections = 1 - self.beta1, 1 - self.beta2, self._corrections(step)
        rates = self.beta1, self.beta2, rest1, rest2, *corrections, self.eps
        _loop(params, gradient, first, second, _Rates(*map(np.float32, rates)))

    def run_kernels(self, tiles: Sequence[Tensor], *, step: int) -> None:
        params, gradient, first, second = tiles
        step_size, root_correction = self._corrections(step)
        scratch = gradient * (1 - self.beta1)  # [n], the only new memory of a tile
        first.mul_(self.beta1).add_(scratch)
        second.mul_(self.beta2).add_(gradient.mul_(gradient).mul_(1 - self.beta2))
        # The gradient is not needed any more, so its memory becomes the denominator's.
        denominator = root(second, out=gradient).div_(root_correction).add_(self.eps)
        params.sub_(torch.mul(first, step_size, out=scratch).div_(denominator))

    def _corrections(self, step: int) -> tuple[float, float]:
        """Of the first and the second moment, in fp64; rounded to fp32 where they meet a tile."""
        step_size = self.lr / (1 - power(self.beta1, step))
        return step_size, math.sqrt(1 - power(self.beta2, step))


def power(factor: float, exponent: int) -> float:
    """`factor ** exponent` by squaring: only multiplies, so no libm decides the last bit."""
    result = 1.0
    # From the lowest bit on: the order of the multiplies decides the last bit, so it is the rule.
    while exponent:
        if exponent & 1:
            result *= factor
        factor *= factor
        exponent >>= 1
    return result


def root(values: Tensor, *, out: Tensor) -> Tensor:
    """The square root of `values`, rounded as IEEE 754 asks, written to `out`.

    Torch hands fp32 `sqrt` to a vector library whose last bit is its own choice: with 2.13 and MKL
    14 % of the results are one unit off. NumPy uses the processor's exact instruction.
    """
    np.sqrt(values.numpy(), out=out.numpy())
    return out
