"""An island's two copies of the weights: the published ones and the ones it trains.

The model's parameters are views into one flat buffer, so a tile of them is a slice and nothing has
to be packed. Owns what a downloaded frame does to the buffers and what a displacement is made of.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from atoll.codecs.base import Codec
from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.base import compiled
from atoll.errors import FrameError, ManifestMismatch
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state import local_weights
from atoll.layout import TILE_BYTES, Fragment, Layout, Span
from atoll.strategies import outer
from atoll.strategies.base import ALL, Fragments, Strategy
from atoll.sums import digest as digests
from atoll.sums.digest import ParamsDigest, RunningDigest
from atoll.wire import frame
from atoll.wire.frame import FrameReader
from atoll.wire.header import FrameHeader


class IslandWeights:
    """θ̂ as published, and the local weights of `model`, which set out from it.

    The model's parameters are `layout`'s by name; their own order does not matter. Local weights
    live on from round to round; a fragment of them becomes the published one when a round that
    carries it is merged. Used by the training thread alone.
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
        self.version: int | None = None
        self.digest: str | None = None
        self.download = download  # moves with the manifest, between two rounds
        self._strategy = strategy
        self._fragments = Fragments.of(strategy, layout)
        self._parts: list[ParamsDigest] = []  # of each fragment of θ̂; empty before the first
        self.newest = Span(0, 0)  # the part that was last fetched
        self._is_leader = group.is_leader
        # Fragments whose local weights are the published ones; training changes all of them.
        self._same: set[Span] = set()
        if group.is_leader:
            compiled.prepare(layout.size)
        # Followers hold no published copy: theirs is the leader's.
        self._published = self.layout.zeros() if group.is_leader else torch.empty(0)
        self._local = local_weights.of(model, self.layout, group)

    def fragment(self, number: int) -> Fragment:
        """The fragment of that number, or the whole model."""
        return self._fragments[number]

    def base_digest(self, number: int) -> str:
        """The digest of a fragment of the published weights that this island holds."""
        if self.digest is None:
            return ""
        # Followers hold no published copy, and what they say is not looked at.
        is_whole = number == ALL or not self._is_leader
        return self.digest if is_whole else self._parts[number].root

    def displacement(self, fragment: Fragment, span: Span) -> Tensor:
        """Δ of a tile of a fragment, fp32 on the CPU; `span` counts from the fragment's start."""
        where = fragment.place(span)
        return outer.displacement(where.of(self._published), self._local.read(where))

    def receive(self, *, run_id: str | None = None) -> "Receiver":
        """A sink for the frame that leads to a later version; of `run_id` only, when given."""
        return Receiver(self, run_id=run_id)

    def reset(self) -> None:
        """Collective: local weights are the published ones, as after a round that did not count."""
        for span in self._trained():
            if self._is_leader:
                self._local.write(span, span.of(self._published))
            self._share(span)

    def _trained(self) -> list[Span]:
        """The fragments whose local weights are not the published ones any more."""
        return [part.span for part in self._fragments.parts if part.span not in self._same]

    def adopt(self, version: int, digest: str, span: Span) -> None:
        """Collective, after the leader has fetched: every rank holds this version of `span`."""
        self.version, self.digest = version, digest
        self._share(span)

    def _share(self, span: Span) -> None:
        self._local.share(self._published if self._is_leader else None, span)
        inside = (part.span for part in self._fragments.parts)
        self._same |= {s for s in inside if span.start <= s.start and s.stop <= span.stop}

    @contextmanager
    def published_shown(self) -> Iterator[None]:
        """While it lasts the model holds the published weights; then its own again, bit for bit."""
        own = [(span, self._local.read(span).clone()) for span in self._trained()]
        for span, _ in own:
            self._local.write(span, span.of(self._published))
        try:
            yield
        finally:
            for span, values in own:
                self._local.write(span, values)

    def gather(self) -> None:
        """Collective: makes the leader's displacement that of all ranks' weights."""
        self._local.gather()

    def train(self) -> None:
        """Training begins: from now on the local weights are their own."""
        self._same = set()

    def forget(self) -> None:
        """Gives the published copy up, torn or wrong as it is: a whole download must replace it."""
        self.torn()
        self._parts = []

    def torn(self) -> None:
        """Notes that the published copy is between two versions, until a frame has arrived."""
        self.version, self.digest = None, None

    def part_of(self, header: FrameHeader) -> int:
        """Which part of the model a frame brings: the fragment that its round carries, or ALL."""
        is_whole = header.layout_digest == self.layout.digest
        return ALL if is_whole else header.fragment

    def store(self, fragment: Fragment, span: Span, payload: Tensor, header: FrameHeader) -> None:
        """Takes a tile of a fragment's frame into the published and the local weights."""
        where = fragment.place(span)
        published = where.of(self._published)
        if header.kind == "weights":
            published.copy_(payload.view(torch.float32))
        else:
            outer.apply_update(published, payload, codec=self.download)
        self._local.write(where, published)

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
        self.newest = self._fragments[number].span
        if number == ALL:
            parts = self._fragments.parts
            self._parts = digests.cut(found, [part.layout for part in parts])
        else:
            self._parts[number] = found
        self.version, self.digest = header.round, digests.composed(self._parts).root


class Receiver:
    """Takes a frame in chunks cut anywhere and applies it tile by tile; holds one tile."""

    def __init__(self, weights: IslandWeights, *, run_id: str | None) -> None:
        self._weights = weights
        self._run_id = run_id
        self._reader = FrameReader(self._take)
        self._header: FrameHeader | None = None
        self._buffer = np.empty(TILE_BYTES, np.uint8)
        self._filled = 0
        self._span: Span | None = None

    def feed(self, chunk: bytes | memoryview) -> None:
        """The next bytes of the frame."""
        self._reader.feed(chunk)

    def finish(self) -> None:
        """Checks what arrived: from now on the weights are of the frame's version."""
        self._reader.finish()
        assert self._header is not None
        self._weights.arrived(self._header, self._number, self._digest.finish())

    def _take(self, piece: memoryview) -> None:
        header = self._header or self._begin()
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            if self._span is None:
                raise FrameError("the frame's payload goes on after the last tile")
            wanted = self._codec.encoded_bytes(len(self._span))
            taken = data[: wanted - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == wanted:
                payload = torch.from_numpy(self._buffer[:wanted])
                self._weights.store(self._fragment, self._span, payload, header)
                self._digest.reached(self._span.stop)
                self._span, self._filled = next(self._spans, None), 0

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
        held, base = weights.version, weights.base_digest(self._number)
        is_full = header.kind == "weights"
        self._codec: Codec = Fp32() if is_full else weights.download
        kind = "weights" if is_full else "update"
        frame.expect(header, layout=self._fragment.layout, codec=self._codec, kind=kind)
        if not is_full and header.base_digest != base:
            raise FrameError(
                f"the update applies to weights {header.base_digest}, the island holds "
                f"{base or None}; it fetches the weights whole"
            )
        if self._number != ALL and header.round != (held or 0) + 1:
            raise FrameError(
                f"the frame brings a fragment of version {header.round}, the island holds version "
                f"{held}; it fetches the weights whole"
            )
        self._header = header
        self._spans = iter(self._fragment.layout.tiles(TILE_BYTES))
        self._span = next(self._spans)
        # Hashed as it comes in, so that the network's time is used.
        self._digest = weights.digest_of(self._fragment)
        # From here on the published copy is between two versions.
        weights.torn()
        return header
