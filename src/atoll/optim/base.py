"""The outer optimizer seam, and the rules its tiles keep.

Implementations are frozen values: their state is plain fp32 buffers that the caller owns, stores
and cuts into tiles. They use only separate multiply, add, subtract, divide and square root, one
rounding per kernel, so a tile's bits depend on neither its size nor the CPU's instruction set.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from atoll.errors import ConfigError, LayoutMismatch


class OuterOptimizer(Protocol):
    """How the mean displacement of a round moves the weights; implementations inherit `init`."""

    name: ClassVar[str]  # by which a run's settings choose it
    slots: ClassVar[tuple[str, ...]]  # names of the state buffers, each as large as the model

    def init(self, size: int) -> dict[str, Tensor]:
        """One fp32 buffer of `size` zeros for each slot; called once, before the first round."""
        return {slot: torch.zeros(size, dtype=torch.float32) for slot in self.slots}

    def update(
        self, params: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Moves one tile of weights and of state, in place.

        `gradient` is the mean displacement (base minus local), so the weights move against it.
        `step` counts rounds from 1 and is the same for all tiles of a round. All tensors are fp32
        tiles of the same span. **`gradient` may be used as scratch**: do not read it afterwards.
        Raises before anything is written when a tile or the step breaks these rules.
        """
        ...


def check_tiles(
    optimizer: OuterOptimizer,
    params: Tensor,
    *,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    step: int,
) -> None:
    """Raises unless tiles are flat fp32 of one size, all slots are there and `step` is above 0."""
    if step < 1:
        raise ConfigError(f"{optimizer.name} got step={step}; outer steps count from 1")
    if set(state) != set(optimizer.slots):
        raise LayoutMismatch(
            f"{optimizer.name} got state {sorted(state)}; it keeps {sorted(optimizer.slots)}"
        )
    for role, tile in {"params": params, "gradient": gradient, **state}.items():
        if tile.shape != params.shape or tile.dim() != 1 or tile.dtype != torch.float32:
            raise LayoutMismatch(
                f"{optimizer.name} got {role!r} of shape {tuple(tile.shape)} and {tile.dtype}; all "
                f"tiles must be flat torch.float32 of the params' shape {tuple(params.shape)}"
            )
