"""The outer step of a gather run: the clipped mean of sparse contributions, then plain SGD.

    norm    per contribution and parameter, from all of its payload, in one order
    factor  min(1, lower median of the round / norm)         rounded once to fp32
    mean    per element over those who sent it, by worker_id; what nobody sent stays as it is

The arithmetic is the gather library's (`gather.norms`, `clip`, `update`), so that the coordinator,
a proof, an island and a group of ranks come to the same bits. See docs/gather.md.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from atoll.compiled.arrays import Bytes, Floats
from atoll.gather import supports, update
from atoll.gather.overlap import PairCounts
from atoll.gather.supports import Supports
from atoll.layout import Layout, Span
from atoll.optim.base import OuterOptimizer
from atoll.optim.sgd import Sgd
from atoll.strategies.gather import report
from atoll.strategies.gather.clipped import Clipped
from atoll.strategies.outcome import Measured, Outcome
from atoll.strategies.outer import DisplacementSource, OuterState, OuterStep


def slices(sources: Sequence[DisplacementSource], span: Span) -> Bytes:
    """The bytes [contributions, n] of a tile."""
    return np.stack([source.raw(span).numpy() for source in sources])


def move(
    tile: Tensor,
    sent: Supports,
    *,
    layout: Layout,
    factors: Floats,
    weights: Sequence[int],
    optimizer: OuterOptimizer,
    step: int,
) -> None:
    """Moves a tile of the weights by what all contributions send for it, in place."""
    mean, _ = update.mean_tile(sent, factors, weights, layout)
    optimizer.update(tile, torch.from_numpy(mean), {}, step=step)


class Pairs:
    """How many places each pair of contributions shares, counted by several threads."""

    def __init__(self, contributions: int) -> None:
        self.counts = PairCounts(contributions)
        self._lock = threading.Lock()

    def add(self, sent: Supports) -> None:
        """Counts a tile; integers add up in any order."""
        own = PairCounts(sent.peers)
        own.add(sent)
        with self._lock:
            self.counts.table += own.table


@dataclass(frozen=True)
class ClippedMean(OuterStep):
    """The settings of one outer step; `prepared` gives the one that can be applied."""

    clipped: Clipped | None = field(default=None, compare=False)
    pairs: Pairs | None = field(default=None, compare=False)  # where somebody wants to know

    @property
    def rate(self) -> float:
        assert isinstance(self.optimizer, Sgd), "settings refuse any other"
        return self.optimizer.lr

    def prepared(
        self, layout: Layout, sources: Sequence[DisplacementSource], *, watched: bool = False
    ) -> Self:
        pairs = Pairs(len(sources)) if watched else None
        return replace(self, clipped=Clipped.of(layout, sources), pairs=pairs)

    def moved(self, state: OuterState, span: Span, sources: Sequence[DisplacementSource]) -> Tensor:
        assert self.clipped is not None, "a median is over all contributions: prepare the step"
        sent = supports.decode(slices(sources, span), span)
        if self.pairs is not None:
            self.pairs.add(sent)
        master = state.master[span.start : span.stop]
        move(
            master,
            sent,
            layout=state.layout,
            factors=self.clipped.factors,
            weights=self.clipped.weights,
            optimizer=self.optimizer,
            step=self.step,
        )
        return master

    def report(self, outcome: Outcome) -> Measured:
        if self.clipped is None or self.pairs is None:
            return {}
        return report.report(outcome, self.clipped, self.pairs.counts)
