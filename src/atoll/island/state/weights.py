"""An island's two copies of the weights: the published ones and the ones it trains.

The model's parameters are views into one flat buffer, so a tile of them is a slice and nothing has
to be packed. Owns what a downloaded frame does to the buffers and what a displacement is made of.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.codecs.base import Codec
from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.base import compiled
from atoll.errors import FrameError, ManifestMismatch
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state import local_weights
from atoll.layout import TILE_BYTES, Fragment, Layout, Span, byte_view
from atoll.strategies import outer
from atoll.strategies.base import ALL, Fragments, Strategy
from atoll.strategies.bundle import Bundle, Change
from atoll.sums import digest as digests
from atoll.sums.digest import ParamsDigest, RunningDigest
from atoll.wire import frame
from atoll.wire.frame import FrameReader, Sink
from atoll.wire.header import FrameHeader
from atoll.wire.tiles import PayloadTiles


@dataclass(frozen=True)
class Staged:
    """What a contribution is made of: Δ of a fragment, tile by tile."""

    fragment: Fragment
    size: int  # elements of the whole model
    tile: Callable[[Span], Tensor]  # fp32 on the CPU; the span counts from the fragment's start


class Keeper(Protocol):
    """Has the published weights outlive the process."""

    def keep(self, version: int, digest: str, weights: memoryview) -> None: ...

    def recall(self, weights: memoryview) -> tuple[int, str] | None: ...


class IslandWeights:
    """θ̂ as published, and the local weights of `model`, which set out from it.

    The model's parameters are `layout`'s by name; their own order does not matter. Local weights
    live on from round to round; a fragment of them takes the published one in when a round that
    carries it is merged, and nothing that arrives changes them.

    The local weights belong to the training thread, the published ones to the thread that receives
    them; `held` is replaced whole. Each may use the other's while that one rests, or where it does
    not write: a fragment that is staged or merged is not on its way then.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        strategy: Strategy,
        download: Codec,
        group: Group = SOLO,
    ) -> None:
        self.layout = layout
        # Version and digest of the published copy; on a follower what the leader last merged.
        self.held: tuple[int | None, str | None] = (None, None)
        self.download = download  # moves with the manifest, between two rounds
        self.merged = 0  # the version up to which the local weights have taken the published in
        self._strategy = strategy
        self._carried: dict[int, int] = {}  # which fragment each of the newest rounds carries
        self._fragments = Fragments.of(strategy, layout)
        self._parts: list[ParamsDigest] = []  # of each fragment of θ̂; empty before the first
        self._is_leader = group.is_leader
        self._is_alone = group.size == 1
        self.keeper: Keeper | None = None  # of the leader, where a restart is to find θ̂
        self._writes_through = False
        self._is_trained = True  # whether the local weights are not those of version `merged`
        if group.is_leader:
            strategy.bundle(layout, 1)  # so that its loops are compiled with the others
            compiled.prepare(layout.size)
        # Followers hold no published copy: theirs is the leader's.
        self._published = self.layout.zeros() if group.is_leader else torch.empty(0)
        self._local = local_weights.of(model, self.layout, group)

    def bundle_in(self, header: FrameHeader, layout: Layout) -> Bundle | None:
        """The contributions that a frame carries in place of what they came to."""
        return self._strategy.bundle_in(header, layout)

    @property
    def version(self) -> int | None:
        """The published version that this island holds."""
        return self.held[0]

    @property
    def digest(self) -> str | None:
        """Its digest."""
        return self.held[1]

    def fragment(self, number: int) -> Fragment:
        """The fragment of that number, or the whole model."""
        return self._fragments[number]

    def carried(self, round_number: int) -> int:
        """Which fragment a round carries, as far as this island knows: only the last differs."""
        usual = self._strategy.fragment(round_number, is_last=False)
        return self._carried.get(round_number, usual)

    def told(self, round_number: int, fragment: int) -> None:
        """The coordinator says which fragment a round carries."""
        known = {n: f for n, f in self._carried.items() if n > self.merged}
        self._carried = {**known, round_number: fragment}

    def base_digest(self, number: int) -> str:
        """The digest of a fragment of the published weights; empty before the first are here.

        While they are fetched whole, in place of a copy that was given up, it is the last one's: a
        fragment that is handed in meanwhile has not moved since it was merged.
        """
        if not self._parts:
            return ""
        return digests.composed(self._parts).root if number == ALL else self._parts[number].root

    def stage(self, number: int, *, copies: bool) -> Staged:
        """Δ of a fragment as it is now; without `copies` as it is when a tile is asked for."""
        fragment = self._fragments[number]

        def displacement(span: Span) -> Tensor:
            where = fragment.place(span)
            return outer.displacement(where.of(self._published), self._local.read(where))

        if not copies:
            return Staged(fragment, self.layout.size, displacement)
        copy = torch.empty(fragment.layout.size)
        for span in fragment.layout.tiles(TILE_BYTES):
            span.of(copy).copy_(displacement(span))
        return Staged(fragment, self.layout.size, lambda span: span.of(copy))

    def receive(self, *, run_id: str | None = None) -> "Receiver":
        """A sink for the frame that leads to a later version; of `run_id` only, when given."""
        return Receiver(self, run_id=run_id)

    # The local weights

    def reset(self) -> None:
        """Collective: local weights are the published ones, as after a round that did not count."""
        if self._is_alone and self.shows_published:
            return
        self._local.merge(self._source, Span(0, self.layout.size), own=0.0)
        self.merged, self._is_trained = self.held[0] or 0, False

    def merge(self, round_number: int) -> None:
        """Collective: takes the fragment of a round, which is here, into the local weights.

        local = w*local + (1-w)*published, where w is the strategy's `local_weight`.
        """
        fragment, own = self._fragments[self.carried(round_number)], self._strategy.local_weight
        self._local.merge(self._source, fragment.span, own=own)
        self.merged = round_number
        if not own and len(fragment.span) == self.layout.size:
            self._is_trained = False

    def can_merge(self) -> bool:
        """Whether each fragment was moved at most once since it was last merged.

        If not, what an earlier round made of it is not here any more. The leader's answer.
        """
        moved = [self.carried(n) for n in range(self.merged + 1, (self.held[0] or 0) + 1)]
        return len(set(moved)) == len(moved) and (ALL not in moved or len(moved) < 2)

    def adopt(self, version: int | None, digest: str | None) -> None:
        """What the leader holds; a follower takes it over."""
        if not self._is_leader:
            self.held = (version, digest)

    @property
    def _source(self) -> Tensor | None:
        return self._published if self._is_leader else None

    @property
    def shows_published(self) -> bool:
        """Whether the model holds the published weights; the leader's answer."""
        return not self._is_trained and self.merged == self.held[0]

    @contextmanager
    def published_shown(self) -> Iterator[None]:
        """Collective: while it lasts the model holds the published weights.

        Then it holds its own again, bit for bit.
        """
        own = self._local.copy()
        self._local.merge(self._source, Span(0, self.layout.size), own=0.0)
        try:
            yield
        finally:
            self._local.put_back(own)

    @contextmanager
    def written_through(self) -> Iterator[None]:
        """While it lasts the training waits, and what arrives is merged tile by tile as it comes.

        Each tile is in the processor's cache then, which saves a pass over the weights. Only where
        a merge is a copy, and in an island of one process.
        """
        self._writes_through = self._is_alone and not self._strategy.local_weight
        try:
            yield
        finally:
            self._writes_through = False

    def gather(self) -> None:
        """Collective: makes the leader's displacement that of all ranks' weights."""
        self._local.gather()

    @property
    def local(self) -> Tensor:
        """The local weights where they lie, fp32 [layout.size]; the leader's, once gathered."""
        return self._local.read(Span(0, self.layout.size))

    def go_on_from(self, local: Tensor | None, *, merged: int) -> None:
        """Collective: the local weights are those that the leader has saved (None: not here)."""
        self._local.merge(local, Span(0, self.layout.size), own=0.0)
        self.merged, self._is_trained = merged, True

    def train(self) -> None:
        """Training begins: from now on the local weights are their own."""
        self._is_trained = True

    # The published weights

    def forget(self) -> None:
        """Gives the published copy up, torn or wrong as it is: a whole download must replace it."""
        self.held = (None, None)

    def recall(self) -> None:
        """Takes up what an earlier life kept, where it is whole; else it holds nothing yet.

        Whether it was ever published the coordinator says, to whom it is told as held.
        """
        if self.keeper is None:
            return
        found = self.keeper.recall(byte_view(self._published))
        if found is None:
            return
        whole = digests.digest(self.layout, self._published)
        parts = digests.cut(whole, [part.layout for part in self._fragments.parts])
        if digests.composed(parts).root == found[1]:
            self._parts, self.held = parts, found

    def part_of(self, header: FrameHeader) -> int:
        """Which part of the model a frame brings: the fragment that its round carries, or ALL."""
        is_whole = header.layout_digest == self.layout.digest
        return ALL if is_whole else header.fragment

    def store(self, fragment: Fragment, span: Span, change: Change) -> None:
        """Does to a tile of the published weights what a fragment's frame says."""
        where = fragment.place(span)
        published = where.of(self._published)
        change(published)
        if self._writes_through and self._is_part(fragment):
            self._local.write(where, published)

    def _is_part(self, fragment: Fragment) -> bool:
        """Whether a frame of it is one of a round's: of several fragments, the whole is none."""
        return any(fragment.span == part.span for part in self._fragments.parts)

    def digest_of(self, fragment: Fragment) -> RunningDigest:
        """The digest of a fragment of the published weights, as it becomes final."""
        return RunningDigest(fragment.layout, fragment.of(self._published))

    def arrived(self, header: FrameHeader, number: int, found: ParamsDigest) -> None:
        """A frame is complete: FrameError unless its part of the weights is what was published."""
        if found.root != header.result_digest:
            raise FrameError(
                f"version {header.round} arrived with digest {found.root}, published is "
                f"{header.result_digest}; the island fetches the weights whole"
            )
        if number == ALL:
            parts = self._fragments.parts
            self._parts = digests.cut(found, [part.layout for part in parts])
        else:
            self._parts[number] = found
        root = digests.composed(self._parts).root
        self.held = (header.round, root)
        if self.keeper is not None:
            self.keeper.keep(header.round, root, byte_view(self._published))
        fragment = self._fragments[number]
        if self._writes_through and self._is_part(fragment):
            self.merged = header.round
            self._is_trained = self._is_trained and fragment.span != self._fragments[ALL].span


class Receiver:
    """Takes a frame in chunks cut anywhere and applies it tile by tile; holds one tile."""

    def __init__(self, weights: IslandWeights, *, run_id: str | None) -> None:
        self._weights = weights
        self._run_id = run_id
        self._reader = FrameReader(self._take)
        self._header: FrameHeader | None = None

    def feed(self, chunk: bytes | memoryview) -> None:
        """The next bytes of the frame."""
        self._reader.feed(chunk)

    def finish(self) -> None:
        """Checks what arrived: from now on the weights are of the frame's version."""
        self._reader.finish()
        assert self._header is not None
        self._weights.arrived(self._header, self._number, self._digest.finish())

    def _take(self, piece: memoryview) -> None:
        if self._header is None:
            self._header = self._begin()
        self._tiles(piece)

    def _store(self, span: Span, change: Change) -> None:
        self._weights.store(self._fragment, span, change)
        self._digest.reached(span.stop)

    def _copy(self, span: Span, payload: Tensor) -> None:
        self._store(span, lambda tile: tile.copy_(payload.view(torch.float32)))

    def _add(self, span: Span, payload: Tensor) -> None:
        codec = self._weights.download
        self._store(span, lambda tile: outer.apply_update(tile, payload, codec=codec))

    def _sink(self, header: FrameHeader) -> Sink:
        """What takes the payload; FrameError or LayoutMismatch unless it is one of the run's."""
        layout, download = self._fragment.layout, self._weights.download
        if header.kind == "weights":
            frame.expect(header, layout=layout, codec=Fp32(), kind="weights")
            return PayloadTiles(Fp32(), layout, self._copy)
        bundle = self._weights.bundle_in(header, layout)
        if bundle is not None:
            frame.expect(header, layout=layout, codec=bundle, kind="update")
            return bundle.tiles(self._store, round_number=header.round)
        frame.expect(header, layout=layout, codec=download, kind="update")
        return PayloadTiles(download, layout, self._add)

    def _begin(self) -> FrameHeader:
        header = self._reader.header
        assert header is not None
        weights = self._weights
        if self._run_id not in (None, header.run_id):
            raise ManifestMismatch(
                f"the download is of run {header.run_id!r}, this island takes part in "
                f"{self._run_id!r}; join the coordinator of that run"
            )
        self._number = weights.part_of(header)
        self._fragment = weights.fragment(self._number)
        held = weights.held[0]
        base = "" if held is None else weights.base_digest(self._number)
        tiles = self._sink(header)
        if header.kind != "weights" and header.base_digest != base:
            raise FrameError(
                f"the update applies to weights {header.base_digest}, the island holds "
                f"{base or None}; it fetches the weights whole"
            )
        if self._number != ALL and header.round != (held or 0) + 1:
            raise FrameError(
                f"the frame brings a fragment of version {header.round}, the island holds version "
                f"{held}; it fetches the weights whole"
            )
        self._tiles = tiles
        # Hashed as it comes in, so that the network's time is used.
        self._digest = weights.digest_of(self._fragment)
        return header
