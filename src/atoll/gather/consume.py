"""What becomes of a window's accepted peers: overlap, clip, update, digest, one step a line.

The same bits whatever the number of ranks, their share of the peers and the size of a tile. A rank
that meets trouble takes part to the next vote, where all of them stop with its sentence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from atoll.collectives.base import Collectives
from atoll.compiled.arrays import Bytes, Doubles, Floats
from atoll.gather import clip, exchange, leaves, supports
from atoll.gather.exchange import Routes, accepted_of
from atoll.gather.findings import Findings, Thresholds, findings
from atoll.gather.overlap import PairCounts
from atoll.gather.partial import Accepted, Partial
from atoll.gather.regrouped import Regrouped
from atoll.gather.result import Merged
from atoll.gather.state_dict import SliceSource
from atoll.gather.supports import Supports
from atoll.gather.turns import Turns
from atoll.gather.update import Update, check_weights
from atoll.gather.vote import vote
from atoll.layout import Span
from atoll.optim.base import OuterOptimizer
from atoll.sums.digest import ParamsDigest


@dataclass(frozen=True, kw_only=True)
class Held:
    """A rank's part of the model: weights and outer state of its own tiles; changed in place."""

    master: Tensor  # fp32 [own]
    slots: Mapping[str, Tensor]  # each like master
    optimizer: OuterOptimizer
    step: int  # counts windows from 1
    moving: Callable[[], None] = lambda: None  # called before the first weight changes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a window is consumed; the same on all ranks."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    overlap_skip: bool = False  # whether blamed copies are left out before the medians


@dataclass(frozen=True, kw_only=True, eq=False)
class Done:
    """What a window did, the same on all ranks."""

    uids: tuple[str, ...]  # whose payloads were applied, in order
    copies: Mapping[str, str]  # uid -> sentence: left out as copies
    medians: Doubles  # [parameters]; empty where nothing was applied
    factors: Floats  # [uids, parameters]
    findings: Findings
    digest: ParamsDigest


@dataclass(frozen=True, kw_only=True, eq=False)
class Consumed(Done):
    """The same with the bytes that did it, while they are kept."""

    tile: Callable[[Span], Bytes]  # the applied bytes [uids, n] of an own tile, for the artifact


@contextmanager
def consumed(
    ranks: Collectives,
    turns: Turns,
    routes: Routes,
    *,
    result: Merged | Sequence[Partial],
    source: SliceSource,
    held: Held,
    weights: Mapping[str, int],
    directory: Path,
    settings: Settings,
) -> Iterator[Consumed]:
    """Applies a window on all ranks; `tile` of what is given works inside the `with` only.

    Every rank raises the same error where one meets trouble, before any weight has changed; only
    where a disk does not give back what it took a moment ago, weights must be loaded anew.
    `result` are partials or what they were merged to. `weights` are by uid, 1 for those it does not
    name.
    """
    window = _Window(ranks, turns, routes, accepted_of(result), held, weights, settings)
    with ExitStack() as stack:
        trouble: Exception | None = None
        try:
            check_weights(window.weights)
            peers = len(window.uids)
            window.tiles = stack.enter_context(Regrouped(directory, window.own, peers=peers))
        except Exception as exc:  # whatever it is, the others must hear of it
            trouble = exc
        vote(ranks, turns.next("control"), trouble)  # ready: nobody begins before all can
        window.exchange(source)
        vote(ranks, turns.next("control"), window.apply())
        yield window.told()


class _Window:
    """The steps of one window on one rank."""

    tiles: Regrouped

    def __init__(
        self,
        ranks: Collectives,
        turns: Turns,
        routes: Routes,
        accepted: Sequence[Accepted],
        held: Held,
        weights: Mapping[str, int],
        settings: Settings,
    ) -> None:
        self._ranks, self._turns, self._routes = ranks, turns, routes
        self._peers = accepted
        assert [peer.uid for peer in self._peers] == routes.uids, routes.uids
        self._held = held
        self._settings = settings
        self.own = routes.owners[ranks.rank]
        self.uids = routes.uids
        self.weights = [weights.get(uid, 1) for uid in self.uids]
        self._update = Update(
            routes.layout,
            self.own,
            held.master,
            optimizer=held.optimizer,
            slots=held.slots,
            step=held.step,
        )
        self._counts = PairCounts(len(self.uids))
        self._copies: dict[str, str] = {}
        self._findings = Findings()
        self._rows = list(range(len(self.uids)))  # those that are applied
        self._clip()

    def _clip(self) -> None:
        squares = [self._peers[row].squares for row in self._rows]
        self._medians, self._factors = clip.medians(squares), clip.factors(squares)

    def exchange(self, source: SliceSource) -> None:
        """Brings every payload's tiles to their owners; counts, and where it can, computes."""
        if not self.uids:
            return
        trouble = exchange.regroup(self._ranks, self._turns, self._routes, source, self._take)
        if self._settings.overlap_skip:
            vote(self._ranks, self._turns.next("control"), trouble)
            self._compare()
            trouble = self._leave_out_copies()
            self._update.vote(self._ranks, self._turns, trouble)
        else:
            self._update.vote(self._ranks, self._turns, trouble)
            self._compare()

    def _take(self, span: Span, slices: Bytes) -> None:
        self.tiles.write(span, slices)
        sent = supports.decode(slices, span)
        self._counts.add(sent)
        if not self._settings.overlap_skip:
            self._update.look(sent, self._factors, self.weights)

    def _compare(self) -> None:
        self._counts.reduce(self._ranks, self._turns)
        self._findings = findings(
            self._counts.shared,
            self._counts.equal,
            kept=supports.kept_by(self._routes.layout.size),
            uids=self.uids,
            stamps={peer.uid: peer.stamp for peer in self._peers},
            thresholds=self._settings.thresholds,
        )

    def _leave_out_copies(self) -> Exception | None:
        """The set is final after this: medians of those that stay, and all tiles looked at."""
        blamed = self._findings.uids_over_thresh
        self._copies = {uid: self._told_of(uid) for uid in blamed}
        self._rows = [row for row, uid in enumerate(self.uids) if uid not in blamed]
        self.weights = [self.weights[row] for row in self._rows]
        self._clip()
        try:
            for span in self._routes.tiles(self._ranks.rank):
                self._update.look(self._read(span), self._factors, self.weights)
        except Exception as exc:  # whatever it is, the others must hear of it
            return exc
        return None

    def _told_of(self, uid: str) -> str:
        pair = max(
            (pair for pair in self._findings.pairs_over_thresh if pair.blamed == uid),
            key=lambda pair: pair.overlap,
        )
        [other] = {*pair.uids} - {uid}
        return (
            f"{uid!r} sent {pair.overlap:.1%} of the places of {other!r}, {pair.equal_codes:.1%} "
            f"of them with equal codes, and later"
        )

    def _read(self, span: Span) -> Supports:
        return supports.decode(self.tile(span), span)

    def tile(self, span: Span) -> Bytes:
        """The applied bytes of an own tile."""
        return np.ascontiguousarray(self.tiles.read(span)[self._rows])

    def apply(self) -> Exception | None:
        """Moves the weights; an empty set moves nothing, not even by momentum."""
        try:
            if self._rows:
                tiles = self._routes.tiles(self._ranks.rank)
                self._held.moving()
                self._update.apply(tiles, self._read, self._factors, self.weights)
        except Exception as exc:  # whatever it is, the others must hear of it
            return exc
        return None

    def told(self) -> Consumed:
        """What the window did, with the digest of the new weights."""
        found = leaves.params_digest(
            self._ranks,
            self._turns,
            self._routes.layout,
            owners=self._routes.owners,
            own=self._held.master,
        )
        return Consumed(
            uids=tuple(self.uids[row] for row in self._rows),
            copies=self._copies,
            medians=self._medians,
            factors=self._factors,
            findings=self._findings,
            digest=found,
            tile=self.tile,
        )
