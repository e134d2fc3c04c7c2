"""Outer SGD: the plain step along the mean displacement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.base import loops_for
from atoll.optim import base


@dataclass(frozen=True, slots=True)
class Sgd:
    """p = p - lr*g; with lr 1 the weights become the mean of the islands' weights."""

    name: ClassVar[str] = "sgd"
    slots: ClassVar[tuple[str, ...]] = ()

    lr: float

    def __post_init__(self) -> None:
        base.check_positive("sgd.lr", self.lr)

    def init(self, size: int) -> dict[str, Tensor]:
        """No state: an empty dict."""
        return base.zeros(self.slots, size)

    def update(
        self, params: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Moves one tile of weights in place; `gradient` is used as scratch."""
        base.check_tiles(self, params, gradient=gradient, state=state, step=step)
        loops = loops_for(params.numel())
        if loops is not None:
            loops.sgd(params.numpy(), gradient.numpy(), np.float32(self.lr))
            return
        params.sub_(gradient.mul_(self.lr))
