"""The run's weights in memory: restored at start, moved on by one round at a time, published.

Owns the outer state and the frames made from it; what a round does to the weights is `replay`'s.
Only the closing thread calls `compute`, `publish` and `snapshot`; any thread may ask for a
download or for what is published.
"""

import logging
import threading
from dataclasses import dataclass, replace

from torch import Tensor

from atoll.codecs import finite
from atoll.codecs.base import Codec
from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.base import compiled
from atoll.coordinator.rounds.spool import Spool, SpooledFrame
from atoll.errors import AtollError, Diverged, NotReady
from atoll.layout import TILE_BYTES, Fragment, Span
from atoll.ledger.records import ContributionRecord, SnapshotRecord
from atoll.strategies.base import ALL
from atoll.strategies.bundle import Bundle
from atoll.strategies.outer import OuterStep
from atoll.versions import weights
from atoll.versions.replay import Applied, Digests, Replay, Version
from atoll.wire.header import FrameHeader, Told

log = logging.getLogger(__name__)

STAND_IN_DIGEST = "0" * 64


@dataclass(frozen=True)
class Current:
    """Which version is published."""

    version: int
    digests: Digests  # of the whole model
    parts: tuple[Digests, ...]  # of each fragment

    @classmethod
    def of(cls, version: Version) -> "Current":
        """A copy of what `version` is now; `version` itself may move on."""
        return cls(version.number, version.digests, tuple(version.parts))


@dataclass(eq=False)
class RunWeights:
    """The published version and its weights.

    `compute`, `publish` and `snapshot` belong to the thread that closes rounds; any thread reads
    `current`, which is replaced whole, and calls `frame_for`, `has_been` and `base_digest`.
    """

    replay: Replay
    spool: Spool
    run_id: str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # held while the buffers change or are read whole
        self._torn = False  # whether a compute ended halfway
        self._computed: _Computed | None = None  # the round that the buffers are ahead by
        # Published digests of the newest versions: islands may be behind by the strategy's lead.
        self._recent: dict[int, str] = {}
        self._initial_lock = threading.Lock()  # over `_initial`, and the reading of it
        self._initial: dict[int, str] = {}  # digests of version 0 by fragment, once asked for
        self._manifests, self._layout = self.replay.manifests, self.replay.layout
        self._strategy = self._manifests.run_strategy
        # So that its loops are compiled with the others
        self._manifests.newest.manifest.upload.build()
        self._manifests.newest.round_strategy.outer(1, 0)
        compiled.prepare(self._layout.size)
        self._version = self._restore()
        self._show()
        self._offer_again()

    def _show(self) -> None:
        """The version in the buffers is the published one from now on."""
        self.current = current = Current.of(self._version)
        kept = {v: d for v, d in self._recent.items() if v >= current.version - self._strategy.lead}
        self._recent = {**kept, current.version: current.digests.published.root}

    def _restore(self) -> Version:
        with self.replay.ledger.reading() as t:
            snapshots = t.snapshots.all()
        version = self.replay.restore(snapshots[-1] if snapshots else None)
        self.replay.follow(version)
        log.info(
            "weights restored",
            extra={"version": version.number, "digest": version.digests.master.root},
        )
        return version

    def _offer_again(self) -> None:
        """Spools the newest versions that travel as their contributions, as an earlier life did.

        As many as are smaller than the whole together, and whose contributions are still stored.
        Whoever gets none of them is offered the whole weights.
        """
        made: list[SpooledFrame] = []  # newest first
        left = self._whole_bytes if self._strategy.follows else 0
        try:
            for number in range(self.current.version, 0, -1):
                frame = self._bundled_again(number, below=left)
                if frame is None:
                    break
                made.append(frame)
                left -= frame.nbytes
        except AtollError as error:  # a blob that is gone, a full disk: the version itself is here
            log.warning("versions are not offered as they were", extra={"reason": str(error)})
        for frame in reversed(made):
            self.spool.put(frame, keep_below=self._whole_bytes)

    def _bundled_again(self, number: int, *, below: int) -> SpooledFrame | None:
        """The frame of a published round, of fewer bytes than `below`; None where it has none."""
        with self.replay.ledger.reading() as t:
            [record], folded = (
                t.rounds.all(first=number, last=number),
                t.contributions.of_round(number),
            )
        bundle = None if record.artifact_sha256 is None else self.replay.bundle(number, folded)
        if bundle is None or bundle.encoded_bytes(self._layout.size) >= below:
            return None
        download = self._manifests.of_round(number).manifest.download.build()
        header = replace(
            self._header_of_round(number, record.fragment, download, bundle),
            result_digest=record.published_digest,
        )
        with self.spool.spooler(bundle, header) as spooler:
            frame = spooler.stream(header, self.replay.bundled(bundle, header, folded))
        if frame.sha256 != record.artifact_sha256 or frame.nbytes >= below:
            frame.path.unlink()
            return None
        return frame

    def has_been(self, version: int | None, digest: str | None) -> bool:
        """Whether `version` is one of the newest published ones and has this `digest`."""
        return version is not None and self._recent.get(version) == digest

    def base_digest(self, round_number: int) -> str:
        """The digest that a contribution made for the round starts from.

        It is that of the round's fragment in the version before the round, or in the published one
        while that is older. Any thread may ask.
        """
        current = self.current
        with self.replay.ledger.reading() as t:
            carried = t.rounds.fragment(round_number)
            base = t.rounds.newest_of(carried, last=min(round_number - 1, current.version))
            newest = t.rounds.newest_of(carried, last=current.version)
        if base == newest:
            found = current.digests if carried == ALL else current.parts[carried]
            return found.published.root
        if base == 0:
            return self._initial_digest(carried)
        with self.replay.ledger.reading() as t:
            [record] = t.rounds.all(first=base, last=base)
        assert record.published_digest is not None, record
        return record.published_digest

    def _initial_digest(self, carried: int) -> str:
        """The digest of a fragment of version 0; read again where a later round has moved it."""
        if carried == ALL:
            return self._manifests.first.manifest.model.initial_digest
        with self._initial_lock:
            if carried not in self._initial:
                # With one of its own: the closing thread may be using `replay`.
                parts = replace(self.replay).restore(None).parts
                self._initial = {number: part.published.root for number, part in enumerate(parts)}
            return self._initial[carried]

    def compute(self, round_number: int, contributions: list[ContributionRecord]) -> Digests:
        """Applies a frozen round to the weights and spools its frame; `publish` offers it.

        Gives the digests of the round's fragment. May be called again for the same round: after
        StorageFull, which leaves the published version as it is, or when the ledger could not
        record what was computed. Diverged when a weight or the optimizer's state is not finite any
        more: the round stays frozen.
        """
        if self._computed is not None and self._computed.round == round_number:
            return self._computed.applied.digests
        download = self._manifests.of_round(round_number).manifest.download.build()
        with self.replay.ledger.reading() as t:
            carried = t.rounds.fragment(round_number)
        fragment = self.replay.fragments[carried]
        bundle = self.replay.bundle(round_number, contributions)
        header = self._header_of_round(round_number, carried, download, bundle)
        with self._lock:
            self._mend()
            with self.spool.spooler(bundle or download, header) as spooler:
                self._torn = True

                def checked(span: Span, payload: Tensor) -> None:
                    self._check_finite(round_number, fragment, span)
                    if bundle is None:
                        spooler(span, payload)

                applied = self.replay.apply(
                    self._version, round_number, contributions, checked, watched=True
                )
                published = applied.digests.published.root
                if bundle is None:
                    frame = spooler.finish(result_digest=published)
                else:
                    final = replace(header, result_digest=published)
                    pieces = self.replay.bundled(bundle, final, contributions, applied.step)
                    frame = spooler.stream(final, pieces)
            # In this order: whoever asks without the lock never finds it settled in between.
            self._computed = _Computed(round_number, len(contributions), applied, frame)
            self._torn = False
            return applied.digests

    @property
    def computed_step(self) -> OuterStep:
        """The outer step of the round that is computed and not published yet."""
        assert self._computed is not None, "asked between `compute` and `publish`"
        return self._computed.applied.step

    @property
    def computed_artifact(self) -> str | None:
        """The sha256 of that round's frame, where its version travels as its contributions."""
        assert self._computed is not None, "asked between `compute` and `publish`"
        return self._computed.frame.sha256

    def _mend(self) -> None:
        """Restores `current` where a compute that found no room has left the buffers half done."""
        if self._torn:
            self._version = self._restore()
            assert self._version.number == self.current.version, self._version.number
            self._torn = False

    def _check_finite(self, round_number: int, fragment: Fragment, span: Span) -> None:
        """Looks at a tile that was just computed, while it is in the processor's cache."""
        state = self._version.state.of(fragment)
        for name, buffer in state.named.items():
            place = finite.first_not_finite(buffer[span.start : span.stop])
            if place is not None:
                tensor = fragment.layout.name_at(span.start + place)
                raise Diverged(
                    f"round {round_number} makes tensor {tensor!r} of {name!r} NaN or infinite and "
                    f"is not published; it is frozen under its settings and no later ones change "
                    f"it: go back to a copy of the state directory from before it and lower "
                    f"outer.lr there (`atoll serve --new-manifest`), or `atoll export` version "
                    f"{round_number - 1} and begin a new run"
                )

    def publish(self) -> None:
        """Offers what `compute` made; called after the ledger has recorded it."""
        with self._lock:
            done = self._computed
            assert done is not None, "only what was computed is published"
            self.replay.moved(self._version, done.round, done.folded, done.applied.digests)
            # What is left to follow is always smaller than the whole.
            keep_below = self._whole_bytes if self._strategy.follows else 0
            self.spool.put(done.frame, keep_below=keep_below)
            self._show()
            self._computed = None

    @property
    def _whole_bytes(self) -> int:
        return Fp32().encoded_bytes(self._layout.size)

    def _header_of_round(
        self, version: int, carried: int, download: Codec, bundle: Bundle | None
    ) -> FrameHeader:
        """Of the frame that brings an island to the version; its result is not known yet."""
        lossless = download.lossless and bundle is None
        return Told(
            kind="weights" if lossless else "update",
            run_id=self.run_id,
            manifest_sha256=self._manifests.of_round(version).sha256,
            round=version,
            fragment=carried,
            base_digest=None if lossless else self.base_digest(version),
            result_digest=STAND_IN_DIGEST,
        ).header(self.replay.fragments[carried].layout, bundle or download)

    def frame_for(self, *, round_number: int, have_digest: str) -> SpooledFrame:
        """The frame of a round for an island that lacks it, or the current weights whole.

        The round's frame, while it is offered and applies to what the island has of its fragment;
        else, while it is the newest of its fragment, that fragment's weights; else the whole
        published weights. Weights are spooled when somebody first asks. NotReady while the buffers
        are ahead of the ledger.
        """
        found = self.spool.leading(round_number, have_digest) if round_number else None
        return found or self._spooled(*self._newest_in(round_number)) or self._spool(round_number)

    def _newest_in(self, round_number: int) -> tuple[int, int]:
        """The fragment that the round was the last to move, and the round.

        Where there is no such one: the whole model, and its version.
        """
        version = self.current.version
        if 0 < round_number <= version:
            with self.replay.ledger.reading() as t:
                carried = t.rounds.fragment(round_number)
                if t.rounds.newest_of(carried, last=version) == round_number:
                    return carried, round_number
        return ALL, version

    def _spooled(self, carried: int, version: int) -> SpooledFrame | None:
        found = self.spool.get("weights", self.replay.fragments[carried].layout)
        return found if found is not None and found.header.round == version else None

    def _spool(self, round_number: int) -> SpooledFrame:
        with self._lock:
            # Once more: it may have moved on before the lock was ours.
            carried, version = self._newest_in(round_number)
            found = self._spooled(carried, version)
            if found is not None:
                return found
            if not self.is_settled:
                raise NotReady(
                    f"version {self.current.version + 1} is computed and being recorded; ask again"
                )
            codec, fragment, current = Fp32(), self.replay.fragments[carried], self.current
            digests = current.digests if carried == ALL else current.parts[carried]
            header = Told(
                kind="weights",
                run_id=self.run_id,
                manifest_sha256=self._manifests.of_round(version).sha256,
                round=version,
                fragment=carried,
                result_digest=STAND_IN_DIGEST,
            ).header(fragment.layout, codec)
            with self.spool.spooler(codec, header) as spooler:
                for span in fragment.layout.tiles(TILE_BYTES):
                    tile = fragment.place(span).of(self._version.state.published)
                    spooler(span, codec.encode(tile, noise=None, first_group=span.first_group))
                spooled = spooler.finish(result_digest=digests.published.root)
            self.spool.put(spooled)
            return spooled

    @property
    def is_settled(self) -> bool:
        """Whether the buffers hold the published version."""
        return not self._torn and self._computed is None

    def snapshot(self) -> SnapshotRecord:
        """Writes the current version's buffers as blobs; the caller records them."""
        assert self.is_settled, "a snapshot is of a published version"
        current, state = self.current.digests, self._version.state
        known = {"master": current.master.root, "published": current.published.root}
        names: dict[str, str] = {}
        for buffer, flat in state.named.items():
            header = self._header_of_whole(known.get(buffer, STAND_IN_DIGEST))
            names[buffer] = weights.store(self.replay.blobs, header, flat, layout=self._layout)
        master = names.pop("master")
        published = names.pop("published", master)
        return SnapshotRecord(
            self.current.version, master, published, slots_sha256=tuple(sorted(names.items()))
        )

    def _header_of_whole(self, digest: str) -> FrameHeader:
        """The header of a whole buffer of the published version."""
        version = self.current.version
        return weights.weights_header(
            self._layout,
            run_id=self.run_id,
            manifest_sha256=self._manifests.of_round(version).sha256,
            version=version,
            digest=digest,
        )


@dataclass(frozen=True)
class _Computed:
    """A round that is computed and not published yet."""

    round: int
    folded: int  # contributions
    applied: Applied
    frame: SpooledFrame
