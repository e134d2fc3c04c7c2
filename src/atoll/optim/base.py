"""The outer optimizer seam, and the rules its tiles keep.

Implementations are frozen values: their state is plain fp32 buffers that the caller owns, stores
and cuts into tiles. They use only separate multiply, add, subtract, divide and square root, one
rounding per kernel, so a tile's bits depend on neither its size nor the CPU's instruction set.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from atoll.compiled.arrays import Floats
from atoll.compiled.base import compiled
from atoll.errors import ConfigError, LayoutMismatch

# The largest norm of a contribution. No outer step can overflow from it: its square (Adam), a rate
# of 100 on momentum of 1e9 rounds of it, and a sum of 10,000 of them weighted by 1e15 tokens are
# all fp32 numbers. A model has left every use long before.
MAX_NORM = 1e18


class OuterOptimizer(Protocol):
    """How the mean displacement of a round moves the weights.

    Implementations inherit `init` and `update`, and give their rule twice: as one compiled loop and
    as torch kernels. Both give the same bits.
    """

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
        if step < 1:
            raise ConfigError(f"{self.name} got step={step}; outer steps count from 1")
        if set(state) != set(self.slots):
            raise LayoutMismatch(
                f"{self.name} got state {sorted(state)}; it keeps {sorted(self.slots)}"
            )
        named = {"params": params, "gradient": gradient} | {k: state[k] for k in self.slots}
        for role, tile in named.items():
            if tile.shape != params.shape or tile.dim() != 1 or tile.dtype != torch.float32:
                raise LayoutMismatch(
                    f"{self.name} got {role!r} of shape {tuple(tile.shape)} and {tile.dtype}; all "
                    f"tiles must be flat torch.float32 of the params' shape {tuple(params.shape)}"
                )
        if compiled.ready(params.numel()):
            self.run_loop([tile.numpy() for tile in named.values()], step=step)
        else:
            self.run_kernels(list(named.values()), step=step)

    def run_loop(self, tiles: Sequence[Floats], *, step: int) -> None:
        """Applies the rule in one compiled pass over params, gradient and the slots, in order."""
        ...

    def run_kernels(self, tiles: Sequence[Tensor], *, step: int) -> None:
        """Applies the rule by torch kernels that round once each, to the same tiles."""
        ...
