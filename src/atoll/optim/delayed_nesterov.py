"""Delayed Nesterov (arXiv:2401.09135, Algorithm 3 with c = 0): momentum once in N contributions.

Applied one by one as they come, contributions of several islands would each be multiplied by the
momentum of all the others. Here each moves the weights by its own share at once, and the momentum
takes in the mean of N of them and moves the weights after the Nth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from atoll.compiled.arrays import FLOATS, NUMBER, Floats
from atoll.compiled.jit import loop
from atoll.optim.base import OuterOptimizer


@loop(FLOATS, FLOATS, FLOATS, NUMBER, NUMBER)
def _collect(
    params: Floats, gradient: Floats, buffer: Floats, lr: np.float32, delay: np.float32
) -> None:
    """A contribution's own share, all [n]; `gradient` is left as it is."""
    for i in range(params.size):
        params[i] = params[i] - (gradient[i] / delay) * lr
        buffer[i] = buffer[i] + gradient[i]


@loop(FLOATS, FLOATS, FLOATS, NUMBER, NUMBER, NUMBER)
def _release(
    params: Floats,
    momentum: Floats,
    buffer: Floats,
    lr: np.float32,
    decay: np.float32,
    delay: np.float32,
) -> None:
    """What the momentum does once N contributions are in the buffer, which is empty after it."""
    for i in range(params.size):
        moved = momentum[i] * decay + buffer[i] / delay
        momentum[i] = moved
        params[i] = params[i] - (moved * decay) * lr
        buffer[i] = np.float32(0)


@dataclass(frozen=True, slots=True)
class DelayedNesterov(OuterOptimizer):
    """The rule for contribution `step`, counted over the whole run, one rounding per operation.

    p = p - lr*(g/delay)
    b = b + g
    and when `delay` divides `step`:
    m = momentum*m + b/delay
    p = p - lr*(momentum*m)
    b = 0

    With a delay of 1 it is Nesterov's rule, and N contributions that started from the same weights
    are one Nesterov step on their mean, up to rounding.
    """

    name: ClassVar[str] = "delayed_nesterov"
    slots: ClassVar[tuple[str, ...]] = ("momentum", "buffer")

    lr: float
    momentum: float
    delay: int

    def run_loop(self, tiles: Sequence[Floats], *, step: int) -> None:
        params, gradient, momentum, buffer = tiles
        lr, delay = np.float32(self.lr), np.float32(self.delay)
        _collect(params, gradient, buffer, lr, delay)
        if step % self.delay == 0:
            _release(params, momentum, buffer, lr, np.float32(self.momentum), delay)

    def run_kernels(self, tiles: Sequence[Tensor], *, step: int) -> None:
        params, gradient, momentum, buffer = tiles
        buffer.add_(gradient)
        params.sub_(gradient.div_(self.delay).mul_(self.lr))
        if step % self.delay == 0:
            momentum.mul_(self.momentum).add_(buffer / self.delay)
            params.sub_((momentum * self.momentum).mul_(self.lr))
            buffer.zero_()
