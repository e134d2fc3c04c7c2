"""Outer SGD: the plain step along the mean displacement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.arrays import FLOATS, NUMBER, Floats
from atoll.compiled.jit import loop
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

    def run_loop(self, tiles: Sequence[Floats], *, step: int) -> None:  # noqa: ARG002
        params, gradient = tiles
        _loop(params, gradient, np.float32(self.lr))

    def run_kernels(self, tiles: Sequence[Tensor], *, step: int) -> None:  # noqa: ARG002
        params, gradient = tiles
        # Two kernels, not `sub_(alpha=lr)`: that one is fused on some CPUs and rounds once there.
        params.sub_(gradient.mul_(self.lr))
