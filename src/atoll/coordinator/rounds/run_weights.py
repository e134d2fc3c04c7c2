"""The run's weights in memory: restored at start, moved on by one round at a time, published.

Owns the outer state and the frames made from it. Only the closing thread calls `compute`,
`publish` and `snapshot`; any thread may ask for a download.
"""

import logging
import threading
from dataclasses import dataclass

from torch import Tensor

from atoll.blobs.base import Blobs
from atoll.codecs import finite
from atoll.codecs.base import Codec
from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.base import compiled
from atoll.coordinator.rounds.spool import Spool, SpooledFrame
from atoll.errors import Diverged, NotReady, StateDamaged
from atoll.layout import TILE_BYTES, Layout, Span
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, SnapshotRecord
from atoll.strategies.diloco import OuterState
from atoll.versions import replay, weights
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Digests
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)

STAND_IN_DIGEST = "0" * 64


@dataclass(frozen=True)
class Current:
    """Which version is published."""

    version: int
    digests: Digests


class RunWeights:
    """The published version and its weights.

    `compute`, `publish` and `snapshot` belong to the thread that closes rounds; any thread reads
    `current`, which is replaced whole, and calls `frame_for`.
    """

    def __init__(
        self,
        ledger: Ledger,
        blobs: Blobs,
        spool: Spool,
        *,
        manifests: Manifests,
        layout: Layout,
        run_id: str,
        threads: int = 1,
    ) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._spool = spool
        self._manifests = manifests
        self._layout = layout
        self._run_id = run_id
        self._threads = threads
        self._lock = threading.Lock()  # held while the buffers change or are read whole
        self._settled = True  # whether the buffers hold `current`: not between compute and publish
        self._torn = False  # whether a compute ended halfway
        self._computed: tuple[int, Digests] | None = None  # the round that the buffers are ahead by
        manifests.newest.manifest.upload.build()  # so that its loops are compiled with the others
        compiled.prepare(layout.size)
        self._state, self.current = self._restore()

    def _restore(self) -> tuple[OuterState, Current]:
        with self._ledger.reading() as t:
            snapshots = t.snapshots.all()
        newest = snapshots[-1] if snapshots else None
        version = 0 if newest is None else newest.version
        state, digests = replay.restore(
            self._ledger,
            self._blobs,
            newest,
            manifests=self._manifests,
            layout=self._layout,
            threads=self._threads,
        )
        rounds = replay.replay(
            state,
            self._ledger,
            self._blobs,
            manifests=self._manifests,
            after_version=version,
            threads=self._threads,
        )
        for replayed in rounds:
            difference = replay.difference(self._layout, replayed)
            if difference is not None:
                raise StateDamaged(
                    f"replay of round {replayed.record.round} gives other bits than the ledger "
                    f"records ({difference}); the last good round is "
                    f"{replayed.record.round - 1}; restore the state directory from a copy"
                )
            version, digests = replayed.record.round, replayed.digests
        log.info("weights restored", extra={"version": version, "digest": digests.master.root})
        return state, Current(version, digests)

    def compute(self, round_number: int, contributions: list[ContributionRecord]) -> Digests:
        """Applies a frozen round to the weights and spools its frame; `publish` offers it.

        May be called again for the same round: after StorageFull, which leaves the published
        version as it is, or when the ledger could not record what was computed. Diverged when a
        weight or the optimizer's state is not finite any more: the round stays frozen.
        """
        if self._computed is not None and self._computed[0] == round_number:
            return self._computed[1]
        manifest = self._manifests.of_round(round_number).manifest
        download = manifest.download.build()
        header = self._header_of_round(round_number, download)
        with self._lock:
            self._mend()
            with self._spool.spooler(self._layout, download, header) as spooler:
                self._settled, self._torn = False, True

                def checked(span: Span, payload: Tensor) -> None:
                    self._check_finite(round_number, span)
                    spooler(span, payload)

                digests = replay.apply_round(
                    self._state,
                    self._blobs,
                    manifest=manifest,
                    round_number=round_number,
                    contributions=contributions,
                    sink=checked,
                    threads=self._threads,
                )
                self._pending = spooler.finish(result_digest=digests.published.root)
            self._torn = False
            self._computed = round_number, digests
            return digests

    def _mend(self) -> None:
        """Puts `current` back into buffers that a compute without room left half done."""
        if self._torn:
            self._state, found = self._restore()
            assert found.version == self.current.version, (found.version, self.current.version)
            self._settled, self._torn = True, False

    def _check_finite(self, round_number: int, span: Span) -> None:
        """Looks at a tile that was just computed, while it is in the processor's cache."""
        state = self._state
        buffers = {"master": state.master, "published": state.published, **state.slots}
        if state.published is state.master:
            del buffers["published"]
        for name, buffer in buffers.items():
            place = finite.first_not_finite(buffer[span.start : span.stop])
            if place is not None:
                tensor = self._layout.name_at(span.start + place)
                raise Diverged(
                    f"round {round_number} makes tensor {tensor!r} of {name!r} NaN or infinite and "
                    f"is not published; it is frozen under its settings and no later ones change "
                    f"it: go back to a copy of the state directory from before it and lower "
                    f"outer.lr there (`atoll serve --new-manifest`), or `atoll export` version "
                    f"{round_number - 1} and begin a new run"
                )

    def publish(self, round_number: int, digests: Digests) -> None:
        """Offers what `compute` made; called after the ledger has recorded it."""
        with self._lock:
            self._spool.put(self._pending)
            self.current = Current(round_number, digests)
            self._settled = True
            self._computed = None

    def _header_of_round(self, version: int, download: Codec) -> FrameHeader:
        lossless = download.lossless
        return FrameHeader.of(
            self._layout,
            download,
            kind="weights" if lossless else "update",
            run_id=self._run_id,
            manifest_sha256=self._manifests.of_round(version).sha256,
            round=version,
            base_digest=None if lossless else self.current.digests.published.root,
            result_digest=STAND_IN_DIGEST,
        )

    def frame_for(self, *, have_digest: str) -> SpooledFrame:
        """The frame that brings an island to the current version.

        The update, when it applies to what the island has; else the whole published weights, which
        are spooled when somebody first asks. NotReady while the buffers are ahead of the ledger.
        """
        current = self.current
        update = self._spool.get("update", version=current.version)
        if update is not None and update.header.base_digest == have_digest:
            return update
        whole = self._spool.get("weights", version=current.version)
        return whole if whole is not None else self._spool_whole()

    def _spool_whole(self) -> SpooledFrame:
        with self._lock:
            current = self.current
            whole = self._spool.get("weights", version=current.version)
            if whole is not None:
                return whole
            if not self._settled:
                raise NotReady(
                    f"version {current.version + 1} is computed and being recorded; ask again"
                )
            codec = Fp32()
            header = FrameHeader.of(
                self._layout,
                codec,
                kind="weights",
                run_id=self._run_id,
                manifest_sha256=self._manifests.of_round(current.version).sha256,
                round=current.version,
                result_digest=STAND_IN_DIGEST,
            )
            with self._spool.spooler(self._layout, codec, header) as spooler:
                for span in self._layout.tiles(TILE_BYTES):
                    tile = self._state.published[span.start : span.stop]
                    spooler(span, codec.encode(tile, noise=None, first_group=span.first_group))
                spooled = spooler.finish(result_digest=current.digests.published.root)
            self._spool.put(spooled)
            return spooled

    @property
    def is_settled(self) -> bool:
        """Whether the buffers hold the published version."""
        return self._settled

    def snapshot(self) -> SnapshotRecord:
        """Writes the current version's buffers as blobs; the caller records them."""
        assert self._settled, "a snapshot is of a published version"
        version = self.current.version

        def stored(buffer: str, digest: str) -> str:
            flat = {"master": self._state.master, "published": self._state.published}.get(buffer)
            header = weights.weights_header(
                self._layout,
                run_id=self._run_id,
                manifest_sha256=self._manifests.of_round(version).sha256,
                version=version,
                digest=digest,
            )
            source = flat if flat is not None else self._state.slots[buffer]
            return weights.store(self._blobs, header, source, layout=self._layout)

        master = stored("master", self.current.digests.master.root)
        lossless = self._state.published is self._state.master
        published = master if lossless else stored("published", self.current.digests.published.root)
        slots = tuple((name, stored(name, STAND_IN_DIGEST)) for name in sorted(self._state.slots))
        return SnapshotRecord(version, master, published, slots)
