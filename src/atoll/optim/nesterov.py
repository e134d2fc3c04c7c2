"""Outer SGD with Nesterov momentum, the optimizer of DiLoCo (arXiv:2311.08105)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.arrays import FLOATS, NUMBER, Floats
from atoll.compiled.jit import loop
from atoll.optim.base import OuterOptimizer


@loop(FLOATS, FLOATS, FLOATS, NUMBER, NUMBER)
def move_tile(
    params: Floats, gradient: Floats, momentum: Floats, lr: np.float32, decay: np.float32
) -> None:
    """One pass over a tile, all [n]; `gradient` is left as it is."""
    for i in range(params.size):
        moved = momentum[i] * decay + gradient[i]
        momentum[i] = moved
        params[i] = params[i] - (gradient[i] + moved * decay) * lr


@dataclass(frozen=True, slots=True)
class Nesterov(OuterOptimizer):
    """The rule of `torch.optim.SGD(nesterov=True)`, one rounding per operation.

    m = momentum*m + g
    p = p - lr*(g + momentum*m)
    """

    name: ClassVar[str] = "nesterov"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    lr: float
    momentum: float

    def run_loop(self, tiles: Sequence[Floats], *, step: int) -> None:  # noqa: ARG002
        params, gradient, momentum = tiles
        settings = np.float32(self.lr), np.float32(self.momentum)
        move_tile(params, gradient, momentum, *settings)

    def run_kernels(self, tiles: Sequence[Tensor], *, step: int) -> None:  # noqa: ARG002
        params, gradient, momentum = tiles
        # The momentum first: the step looks ahead along the new one.
        momentum.mul_(self.momentum).add_(gradient)
        gradient.add_(momentum * self.momentum)
        params.sub_(gradient.mul_(self.lr))
