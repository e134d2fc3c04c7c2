"""Outer SGD with Nesterov momentum, the optimizer of DiLoCo (arXiv:2311.08105)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.base import loops_for
from atoll.optim import base


@dataclass(frozen=True, slots=True)
class Nesterov:
    """The rule of `torch.optim.SGD(nesterov=True)`, one rounding per operation.

    m = momentum*m + g
    p = p - lr*(g + momentum*m)
    """

    name: ClassVar[str] = "nesterov"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        base.check_positive("nesterov.lr", self.lr)
        base.check_decay("nesterov.momentum", self.momentum)

    def init(self, size: int) -> dict[str, Tensor]:
        """A momentum of zeros."""
        return base.zeros(self.slots, size)

    def update(
        self, params: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Moves one tile of weights and momentum in place; `gradient` is used as scratch."""
        base.check_tiles(self, params, gradient=gradient, state=state, step=step)
        momentum = state["momentum"]
        loops = loops_for(params.numel())
        if loops is not None:
            settings = np.float32(self.lr), np.float32(self.momentum)
            loops.nesterov(params.numpy(), gradient.numpy(), momentum.numpy(), *settings)
            return
        momentum.mul_(self.momentum).add_(gradient)
        gradient.add_(momentum * self.momentum)
        params.sub_(gradient.mul_(self.lr))
