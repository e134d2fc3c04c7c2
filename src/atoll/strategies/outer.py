"""The outer step of synchronous DiLoCo, tile by tile (arXiv 2311.08105).

    Δ    = Σ_w weight_w · Δ_w / Σ_w weight_w        canonical order: worker_id
    θ    = outer(θ, Δ)                              the fp32 master
    u    = encode(θ - θ̂),  θ̂ = θ̂ + decode(u)       lossy download codec only; lossless: θ̂ = θ

A pure function of (state, ordered contributions, settings): the same bits for any tile size. Memory
is a few tiles, whatever the number of contributions. Threads share a step by parts of the layout.
Owns no file, no ledger, no network; contributions are read and payloads are written through seams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.layout import TILE_BYTES, Fragment, Layout, Span
from atoll.optim.base import OuterOptimizer
from atoll.strategies.outcome import Measured, Outcome
from atoll.sums import fold

NOISE_LANE_DOWNLOAD = "download"


class DisplacementSource(Protocol):
    """One contribution, readable at any tile."""

    @property
    def weight(self) -> int: ...

    @property
    def factor(self) -> float:
        """What a step that takes contributions one by one multiplies this one by."""

    def tile(self, span: Span) -> Tensor:
        """The decoded displacement of `span`, fp32."""

    def raw(self, span: Span) -> Tensor:
        """The bytes of `span` as they were handed in, uint8."""


class PayloadSink(Protocol):
    """Where the published payload goes, tile by tile."""

    def __call__(self, span: Span, payload: Tensor) -> None: ...


@dataclass
class OuterState:
    """The weights that a run's ledger stands for, at one version. Buffers change in place."""

    layout: Layout
    master: Tensor  # θ, fp32 [layout.size]
    slots: dict[str, Tensor]  # the outer optimizer's state, each like master
    published: Tensor  # θ̂; the master itself when the download codec is lossless

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Master and published weights; one buffer where they are the same."""
        return (self.master,) if self.published is self.master else (self.master, self.published)

    @property
    def named(self) -> dict[str, Tensor]:
        """Every buffer by its name; "published" only where it is not the master itself."""
        names = ("master", "published")[: len(self.buffers)]
        return dict(zip(names, self.buffers, strict=True)) | self.slots

    def of(self, fragment: Fragment) -> "OuterState":
        """The state of one fragment: parts of the same buffers, so what moves one moves both."""
        master = fragment.of(self.master)
        published = master if self.published is self.master else fragment.of(self.published)
        slots = {name: fragment.of(buffer) for name, buffer in self.slots.items()}
        return OuterState(fragment.layout, master, slots, published)

    def publish_with(self, download: Codec, span: Span) -> None:
        """Before a round of `span`: sees that θ̂ has a buffer of its own where it needs one.

        From lossless to lossy θ̂ starts as what was published, which is θ. From lossy to lossless a
        round publishes θ itself, so the difference carried so far ends with it; where the round is
        of one fragment of several, the others still have theirs.
        """
        aliased = self.published is self.master
        if aliased and not download.lossless:
            self.published = self.master.clone()
        elif download.lossless and not aliased and len(span) == self.layout.size:
            self.published = self.master


def fresh_state(
    layout: Layout, weights: Tensor, *, optimizer: OuterOptimizer, download: Codec
) -> OuterState:
    """Version 0: `weights` become the master (not copied), with empty outer state."""
    published = weights if download.lossless else weights.clone()
    return OuterState(layout, weights, optimizer.init(layout.size), published)


@dataclass(frozen=True)
class OuterStep:
    """The settings of one outer step, on the mean of a round's contributions."""

    one_by_one: ClassVar[bool] = False  # whether each contribution is a step of its own

    optimizer: OuterOptimizer
    download: Codec
    noise: Noise | None
    step: int  # counts from 1: how many steps this part of the weights has made with this one
    tile_bytes: int = TILE_BYTES

    def prepared(
        self,
        layout: Layout,
        sources: Sequence[DisplacementSource],
        *,
        watched: bool = False,
    ) -> Self:
        """The step with all it must know of `sources` before it moves the first tile.

        Called once, before `apply`. When it is `watched`, it notes what people want to know.
        """
        del layout, sources, watched  # this one looks at a tile at a time
        return self

    def apply(
        self,
        state: OuterState,
        sources: Sequence[DisplacementSource],
        sink: PayloadSink | None,
        *,
        part: Span | None = None,
        reached: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Moves `state` one version on; `sources` must be in canonical order.

        With `part`, one of the layout's with this tile size, only that; other threads may work on
        the others, if sources and sink bear it. `reached` is told after each tile up to which
        element the state is the new version's. When this raises, `state` is torn between two
        versions and must be rebuilt from the ledger.
        """
        for span in state.layout.tiles(self.tile_bytes, part):
            payload = self._tile(state, span, sources)
            if sink is not None:
                sink(span, payload)
            reached(span.stop)

    def report(self, outcome: Outcome) -> Measured:
        """Tells what there is to tell of a round that this step, watched, has computed."""
        del outcome  # a mean says nothing about its terms
        return {}

    def _tile(self, state: OuterState, span: Span, sources: Sequence[DisplacementSource]) -> Tensor:
        return self._publish(state, self.moved(state, span, sources), span)

    def moved(self, state: OuterState, span: Span, sources: Sequence[DisplacementSource]) -> Tensor:
        """Moves the master and the optimizer's state; the tile of the master."""
        where = slice(span.start, span.stop)
        terms = ((source.tile(span), source.weight) for source in sources)
        total = fold.fold_tile(terms, unit="weight")
        master = state.master[where]
        slots = {name: buffer[where] for name, buffer in state.slots.items()}
        self.optimizer.update(master, total.mean(), slots, step=self.step)
        return master

    def _publish(self, state: OuterState, master: Tensor, span: Span) -> Tensor:
        published = state.published[span.start : span.stop]
        if self.download.lossless:
            if state.published is not state.master:
                published.copy_(master)
            return self.download.encode(master, noise=None, first_group=span.first_group)
        payload = torch.empty(self.download.encoded_bytes(len(span)), dtype=torch.uint8)
        fused = self.download.fused(payload, len(span))
        if fused is not None:
            fused.publish(master, published, payload)
        else:
            self.download.encode(
                master - published, noise=self.noise, first_group=span.first_group, out=payload
            )
            apply_update(published, payload, codec=self.download)
        return payload


def apply_update(published: Tensor, payload: Tensor, *, codec: Codec) -> None:
    """θ̂ += decode(payload), in place: what coordinator and islands compute alike."""
    published.add_(codec.decode(payload, published.numel()))


def displacement(base: Tensor, local: Tensor) -> Tensor:
    """Δ = base - local: what one island contributes for a tile."""
    return base - local


def mix(local: Tensor, published: Tensor, *, own: float) -> None:
    """A merge: local = own*local + (1-own)*published, in place.

    Two multiplies and an add, each rounded once: `lerp` fuses them on some CPUs. Without a weight
    of its own it is a copy, which keeps the sign of a zero.
    """
    if own:
        local.mul_(own).add_(published.to(local.device) * (1.0 - own))
    else:
        local.copy_(published)
