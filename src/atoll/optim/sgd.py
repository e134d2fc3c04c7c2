"""Outer SGD: the plain step along the mean displacement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.arrays import FLOATS, NUMBER, Floats
from atoll.compiled.base import compiled
from atoll.compiled.jit import loop
from atoll.optim import base
from atoll.optim.base import OuterOptimizer


@loop(FLOATS, FLOATS, NUMBER)
def _loop(params: Floats, gradient: Floats, lr: np.float32) -> None:
    """One pass over a tile, all [n]; `gradient` is left as it is."""
    for i in range(params.size):
        params[i] = params[i] - gradient[i] * lr


@dataclass(frozen=True, slots=True)
class Sgd(OuterOptimizer):
    """p = p - lr*g; with lr 1 the weights become the mean of the islands' weights."""

    name: ClassVar[str] = "sgd"
    slots: ClassVar[tuple[str, ...]] = ()

    lr: float

    def update(
        self, params: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Moves one tile of weights in place; `gradient` is used as scratch."""
        base.check_tiles(self, params, gradient=gradient, state=state, step=step)
        if compiled.ready(params.numel()):
            _loop(params.numpy(), gradient.numpy(), np.float32(self.lr))
            return
        # Two kernels, not `sub_(alpha=lr)`: that one is fused on some CPUs and rounds once there.
        params.sub_(gradient.mul_(self.lr))
