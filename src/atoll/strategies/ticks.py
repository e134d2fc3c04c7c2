"""The outer step of asynchronous DiLoCo: contributions one by one, never averaged.

    for each contribution of the round, by worker_id, and t = its number in the run, from 1:
    θ = outer(θ, factor · Δ, t)

What the weights become does not depend on how many came together in a round. The number comes from
the ledger and the factor from what is recorded of the contribution, so it replays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.errors import EmptySum
from atoll.layout import Span
from atoll.strategies.outer import DisplacementSource, OuterState, OuterStep


@dataclass(frozen=True)
class Ticks(OuterStep):
    """`step` is the number of the round's first contribution."""

    one_by_one: ClassVar[bool] = True

    def moved(self, state: OuterState, span: Span, sources: Sequence[DisplacementSource]) -> Tensor:
        where = slice(span.start, span.stop)
        master = state.master[where]
        slots = {name: buffer[where] for name, buffer in state.slots.items()}
        if not sources:
            raise EmptySum("no contribution was accepted for this tile; the model is unchanged")
        # The tile is the source's own memory, and the optimizer may write over what it is given.
        gradient = torch.empty(len(span), dtype=torch.float32)
        for tick, source in enumerate(sources, start=self.step):
            torch.mul(source.tile(span), source.factor, out=gradient)
            self.optimizer.update(master, gradient, slots, step=tick)
        return master
