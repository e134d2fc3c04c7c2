"""AdamW (arXiv:1711.05101) on a rank's own tiles: weight decay beside the rule of `optim.adam`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import LayoutMismatch
from atoll.optim.adam import Adam


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """The rule of `torch.optim.AdamW`, one rounding per operation.

    p = p * (1 - lr*weight_decay)          (matrices only)
    and then Adam's step with its gradient alone

    The learning rate is an argument of each step: it follows the run's tokens. Tiles may be fp32,
    which large ones are stepped in by a compiled loop, or float64.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def update(self, tiles: Sequence[Tensor], *, lr: float, step: int, decays: bool) -> None:
        """Moves weights, first and second moments of one tile, in place.

        `tiles` are weights, gradient, first and second moments, flat and alike; the gradient may be
        used as scratch. `step` counts from 1 and is the same for all tiles of a step.
        """
        weights, gradient, first, second = tiles
        if any(tile.shape != weights.shape or tile.dtype != weights.dtype for tile in tiles):
            raise LayoutMismatch(
                f"adamw got tiles {[(tuple(t.shape), t.dtype) for t in tiles]}; all must be alike"
            )
        if decays and self.weight_decay:
            weights.mul_(1 - lr * self.weight_decay)
        rule = Adam(lr, self.beta1, beta2=self.beta2, eps=self.eps)
        if weights.dtype == torch.float32:
            state = dict(zip(Adam.slots, (first, second), strict=True))
            rule.update(weights, gradient, state, step=step)
        else:
            rule.run_kernels(tiles, step=step)
