"""An island's two copies of the weights: the published ones and the ones it trains.

The model's parameters are views into one flat buffer, so a tile of them is a slice and nothing has
to be packed. Owns what a downloaded frame does to the buffers and what a displacement is made of.
"""

import numpy as np
import torch
from torch import Tensor, nn

from atoll.codecs.base import Codec
from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.base import compiled
from atoll.errors import FrameError, ManifestMismatch
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state import local_weights
from atoll.layout import TILE_BYTES, Layout, Span
from atoll.strategies import diloco
from atoll.sums.digest import RunningDigest
from atoll.wire import frame
from atoll.wire.frame import FrameReader
from atoll.wire.header import FrameHeader


class IslandWeights:
    """θ̂ as published, and the local weights of `model`, which start from it.

    The model's parameters are `layout`'s by name; their own order does not matter. For the thread
    that trains.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, *, download: Codec, group: Group = SOLO
    ) -> None:
        self.layout = layout
        self.version: int | None = None
        self.digest: str | None = None
        self.download = download  # moves with the manifest, between two rounds
        self._trained = True
        self._is_leader = group.is_leader
        if group.is_leader:
            compiled.prepare(layout.size)
        # Followers hold no published copy: theirs is the leader's.
        self._published = self.layout.zeros() if group.is_leader else torch.empty(0)
        self._local = local_weights.of(model, self.layout, group)

    def displacement(self, span: Span) -> Tensor:
        """Δ of a tile, fp32 on the CPU."""
        base = self._published[span.start : span.stop]
        return diloco.displacement(base, self._local.read(span))

    def receive(self, *, run_id: str | None = None) -> "Receiver":
        """A sink for the frame that leads to the next version; of `run_id` only, when given."""
        return Receiver(self, self.download, run_id=run_id)

    def reset(self) -> None:
        """Local weights are the published ones, also after a round that did not count."""
        if self._trained:
            if self._is_leader:
                self._local.write(Span(0, self.layout.size), self._published)
            self._local.share(self._published if self._is_leader else None)
        self._trained = False

    def adopt(self, version: int, digest: str) -> None:
        """Collective, after the leader has fetched: every rank holds this version."""
        self.version, self.digest = version, digest
        self._local.share(self._published if self._is_leader else None)
        self._trained = False

    def gather(self) -> None:
        """Collective: makes the leader's displacement that of all ranks' weights."""
        self._local.gather()

    def train(self) -> None:
        """Training begins: from now on the local weights are their own."""
        self._trained = True

    def forget(self) -> None:
        """The published copy is torn or wrong: only a whole download makes it good."""
        self.version, self.digest = None, None

    def _store(self, span: Span, payload: Tensor, header: FrameHeader) -> None:
        published = self._published[span.start : span.stop]
        if header.kind == "weights":
            published.copy_(payload.view(torch.float32))
        else:
            diloco.apply_update(published, payload, codec=self.download)
        self._local.write(span, published)

    def _finish(self, header: FrameHeader, found: str) -> None:
        if found != header.result_digest:
            raise FrameError(
                f"version {header.round} arrived with digest {found}, published is "
                f"{header.result_digest}; the island fetches the weights whole"
            )
        self.version, self.digest = header.round, found
        self._trained = False  # each tile was copied to the local weights as it came in


class Receiver:
    """Takes a frame in chunks cut anywhere and applies it tile by tile; holds one tile."""

    def __init__(self, weights: IslandWeights, download: Codec, *, run_id: str | None) -> None:
        self._weights = weights
        self._run_id = run_id
        self._download = download
        self._reader = FrameReader(self._take)
        self._header: FrameHeader | None = None
        self._spans = iter(weights.layout.tiles(TILE_BYTES))
        self._buffer = np.empty(TILE_BYTES, np.uint8)
        self._filled = 0
        self._span: Span | None = None
        # Hashed as it comes in, so that the network's time is used.
        self._digest = RunningDigest(weights.layout, weights._published)

    def feed(self, chunk: bytes | memoryview) -> None:
        """The next bytes of the frame."""
        self._reader.feed(chunk)

    def finish(self) -> None:
        """Checks the whole: the local and published weights are the version's now."""
        self._reader.finish()
        assert self._header is not None
        self._weights._finish(self._header, self._digest.finish().root)

    def _take(self, piece: memoryview) -> None:
        if self._header is None:
            self._begin()
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            wanted = self._wanted()
            taken = data[: wanted - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == wanted:
                self._apply(wanted)

    def _begin(self) -> None:
        header = self._reader.header
        assert header is not None
        weights = self._weights
        if self._run_id not in (None, header.run_id):
            raise ManifestMismatch(
                f"the download is of run {header.run_id!r}, this island takes part in "
                f"{self._run_id!r}; join the coordinator of that run"
            )
        whole = header.kind == "weights"
        codec: Codec = Fp32() if whole else self._download
        frame.expect(
            header, layout=weights.layout, codec=codec, kind="weights" if whole else "update"
        )
        if header.kind == "update" and header.base_digest != weights.digest:
            raise FrameError(
                f"the update applies to weights {header.base_digest}, the island holds "
                f"{weights.digest}; it fetches the weights whole"
            )
        self._header, self._codec = header, codec
        self._span = next(self._spans)
        # From here on the published copy is between two versions.
        weights.forget()

    def _wanted(self) -> int:
        if self._span is None:
            raise FrameError("the frame's payload goes on after the last tile")
        return self._codec.encoded_bytes(len(self._span))

    def _apply(self, nbytes: int) -> None:
        assert self._span is not None and self._header is not None
        payload = torch.from_numpy(self._buffer[:nbytes])
        self._weights._store(self._span, payload, self._header)
        self._digest.reached(self._span.stop)
        self._span = next(self._spans, None)
        self._filled = 0
