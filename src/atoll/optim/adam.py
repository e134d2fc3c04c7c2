"""Outer Adam (arXiv:1412.6980), as `torch.optim.Adam` without weight decay and amsgrad."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.compiled.arrays import AdamRates
from atoll.compiled.base import loops_for
from atoll.errors import ConfigError
from atoll.optim import base

SMALLEST_EPS = 2.0**-126  # the smallest normal fp32; below it eps could round to 0


@dataclass(frozen=True, slots=True)
class Adam:
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

    def __post_init__(self) -> None:
        base.check_positive("adam.lr", self.lr)
        base.check_decay("adam.beta1", self.beta1)
        base.check_decay("adam.beta2", self.beta2)
        base.check_positive("adam.eps", self.eps)
        if self.eps < SMALLEST_EPS:
            raise ConfigError(
                f"adam.eps={self.eps!r} must be at least {SMALLEST_EPS!r}; "
                f"a smaller one vanishes in fp32 and the step would divide by zero"
            )

    def init(self, size: int) -> dict[str, Tensor]:
        """Both moments as zeros."""
        return base.zeros(self.slots, size)

    def update(
        self, params: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Moves one tile of weights and moments in place; `gradient` is used as scratch."""
        base.check_tiles(self, params, gradient=gradient, state=state, step=step)
        first, second = state["first_moment"], state["second_moment"]
        step_size = self.lr / (1 - power(self.beta1, step))
        root_correction = math.sqrt(1 - power(self.beta2, step))

        loops = loops_for(params.numel())
        if loops is not None:
            rates = AdamRates(
                beta1=np.float32(self.beta1),
                beta2=np.float32(self.beta2),
                rest1=np.float32(1 - self.beta1),
                rest2=np.float32(1 - self.beta2),
                step_size=np.float32(step_size),
                root_correction=np.float32(root_correction),
                eps=np.float32(self.eps),
            )
            tiles = params.numpy(), gradient.numpy(), first.numpy(), second.numpy()
            loops.adam(*tiles, rates)
            return
        scratch = gradient * (1 - self.beta1)
        first.mul_(self.beta1).add_(scratch)
        second.mul_(self.beta2).add_(gradient.mul_(gradient).mul_(1 - self.beta2))
        denominator = root(second, out=gradient).div_(root_correction).add_(self.eps)
        params.sub_(torch.mul(first, step_size, out=scratch).div_(denominator))


def power(factor: float, exponent: int) -> float:
    """`factor ** exponent` by squaring: only multiplies, so no libm decides the last bit."""
    result = 1.0
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
