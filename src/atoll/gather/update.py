"""The outer step of a window: each rank moves its own tiles by the clipped mean of all peers.

Per coordinate, over the peers that sent it, in the order of their uids (by code point):

    total = 0;  total = total + ((value · factor) · weight)      fp32, each operation rounded once
    mean  = total / Σ weight                                     the sum exact, rounded once to fp32

A sent zero counts: its peer's weight is in the sum. What nobody sent has the mean 0. Sums per rank
would have other bits, so one rank owns a coordinate and adds all of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import finite
from atoll.codecs.topk.chunks import ABOVE, CHUNK, NEGATIVE
from atoll.codecs.topk.magnitudes import VALUES
from atoll.collectives.base import Collectives
from atoll.compiled.arrays import Floats, Integers
from atoll.compiled.base import compiled
from atoll.errors import ConfigError, Diverged, LayoutMismatch, StoreError
from atoll.gather import loops
from atoll.gather.supports import Supports
from atoll.gather.turns import Turns
from atoll.gather.vote import vote
from atoll.layout import Layout, Span
from atoll.optim.base import OuterOptimizer
from atoll.sums import partial


def mean_tile(
    sent: Supports, factors: Floats, weights: Sequence[int], layout: Layout
) -> tuple[Floats, Integers]:
    """The mean fp32 [n] of a tile, and the exact sums of weights int64 [n] that it was divided by.

    `factors` [peers, parameters of the layout] and `weights` (integers from 1 on) are in the order
    of the rows of `sent`.
    """
    check_weights(weights)
    span = sent.span
    first, stops = _parameters(layout, span)
    own = np.ascontiguousarray(factors[:, first : first + len(stops)])
    whole = np.array(weights, np.int64)
    mean, counts = np.zeros(len(span), np.float32), np.zeros(len(span), np.int64)
    if compiled.ready_for_any():
        shares = whole.astype(np.float32)
        told = (sent.indices, sent.codes, sent.magnitudes, own, stops, shares, whole)
        loops.mean(*told, mean, counts)
    else:
        _mean(sent, own, stops, whole, mean, counts)
    return mean, counts


def _mean(
    sent: Supports,
    factors: Floats,
    stops: Integers,
    weights: Integers,
    mean: Floats,
    counts: Integers,
) -> None:
    """`loops.mean` in numpy. A peer names no place twice, so adding by index drops nothing."""
    for row, weight in enumerate(weights):
        places, codes = sent.indices[row], sent.codes[row]
        sizes = VALUES[sent.magnitudes[row, places // CHUNK, codes & ABOVE]]
        values = np.where(codes & NEGATIVE, -sizes, sizes)
        own = factors[row, np.searchsorted(stops, places, side="right")]
        mean[places] += (values * own) * np.float32(weight)
        counts[places] += weight
    sent_by_any = counts > 0
    mean[sent_by_any] /= counts[sent_by_any].astype(np.float32)


def check_weights(weights: Iterable[int]) -> None:
    """ConfigError unless all are integers from 1 on."""
    for weight in weights:
        partial.check_count("weight", weight)
        if weight < 1:
            raise ConfigError(
                f"weight={weight} of a peer must be at least 1; leave out a peer that counts 0"
            )


def _parameters(layout: Layout, span: Span) -> tuple[int, Integers]:
    """The first parameter of a tile, and where each one in it stops, from the tile's start."""
    first = bisect_right(layout.tensors, span.start, key=lambda t: t.span.stop)
    stops = []
    for tensor in layout.tensors[first:]:
        stops.append(min(tensor.span.stop, span.stop) - span.start)
        if tensor.span.stop >= span.stop:
            break
    return first, np.array(stops, np.int64)


class Update:
    """One rank's weights and outer state of a window: looked at tile by tile, voted, then applied.

    All tiles are computed before one is applied: `look` at each, `vote` with the other ranks, then
    `apply`, which computes the same again. Only tiles under way are held besides the weights.
    """

    def __init__(
        self,
        layout: Layout,
        own: Span,
        master: Tensor,
        *,
        optimizer: OuterOptimizer,
        slots: Mapping[str, Tensor] | None = None,
        step: int,
    ) -> None:
        """`master` and the optimizer's `slots` are fp32 [len(own)] and change in `apply` alone."""
        for name, buffer in {"master": master, **(slots or {})}.items():
            if buffer.shape != (len(own),) or buffer.dtype != torch.float32:
                raise LayoutMismatch(
                    f"{name} of shape {tuple(buffer.shape)} and {buffer.dtype} cannot be updated; "
                    f"a rank holds torch.float32 of the {len(own)} elements that it owns"
                )
        self._layout = layout
        self._own = own
        self._master = master
        self._slots = dict(slots or {})
        self._optimizer = optimizer
        self._step = step
        self._looked = 0  # elements whose result is known to be finite
        self._is_agreed = False

    def look(self, sent: Supports, factors: Floats, weights: Sequence[int]) -> None:
        """Computes a tile and drops it; Diverged when it would not be finite."""
        span = sent.span
        tiles = [buffer.clone() for buffer in self._tiles(span).values()]
        self._move(sent, factors, weights, dict(zip(self._tiles(span), tiles, strict=True)))
        for tile in tiles:
            place = finite.first_not_finite(tile)
            if place is not None:
                name = self._layout.name_at(span.start + place)
                raise Diverged(
                    f"the update makes element {span.start + place} of the layout, in tensor "
                    f"{name!r}, {float(tile[place])}; nothing was applied on any rank. Lower the "
                    f"outer lr, or the norm bound of contributions"
                )
        self._looked += len(span)

    def vote(self, ranks: Collectives, turns: Turns, trouble: Exception | None) -> None:
        """Returns when every rank looked at all its tiles without trouble; else raises on all."""
        vote(ranks, turns.next("control"), trouble)
        # Tiles that nobody told of came as zeros, from a rank whose spool reads so by now.
        lost: StoreError | None = None
        if self._looked != len(self._own):
            lost = StoreError(
                f"of {len(self._own)} own elements {len(self._own) - self._looked} came as zeros, "
                f"which no peer sends: a spool was damaged after it was checked. Nothing was "
                f"applied on any rank; check the disks and start the group again"
            )
        vote(ranks, turns.next("control"), lost)
        self._is_agreed = True

    def apply(
        self,
        tiles: Iterable[Span],
        read: Callable[[Span], Supports],
        factors: Floats,
        weights: Sequence[int],
    ) -> None:
        """Moves weights and state for good; after an error in here they are torn, load them."""
        assert self._is_agreed, "no tile is applied before all ranks have voted"
        self._is_agreed = False
        for span in tiles:
            self._move(read(span), factors, weights, self._tiles(span))

    def _tiles(self, span: Span) -> dict[str, Tensor]:
        place = slice(span.start - self._own.start, span.stop - self._own.start)
        return {"": self._master[place]} | {k: buffer[place] for k, buffer in self._slots.items()}

    def _move(
        self, sent: Supports, factors: Floats, weights: Sequence[int], tiles: dict[str, Tensor]
    ) -> None:
        mean, _ = mean_tile(sent, factors, weights, self._layout)
        slots = {name: tile for name, tile in tiles.items() if name}
        self._optimizer.update(tiles[""], torch.from_numpy(mean), slots, step=self._step)
