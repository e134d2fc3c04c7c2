"""The coordinator of a sharded run, as one object without any transport.

It never holds the model, not even a shard: parts pass through to blobs, and digests are made piece
by piece. All methods are synchronous and thread-safe; `advance` belongs to one thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.blobs.base import BlobReader, Blobs
from atoll.coordinator.authority import Authority
from atoll.coordinator.sharded import certificates
from atoll.coordinator.sharded.boundaries import Boundaries
from atoll.coordinator.sharded.checkpoints import Checkpoints
from atoll.coordinator.sharded.damages import LOST, Damages
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.hashes import Hashes
from atoll.coordinator.sharded.intervals import Intervals
from atoll.coordinator.sharded.part_uploads import PartRequest, PartStream
from atoll.coordinator.sharded.saves import Saves
from atoll.coordinator.sharded.status import ShardedReport
from atoll.data.parts import Part
from atoll.errors import BlobMissing, ProtocolError
from atoll.ledger.records import CheckpointRecord, RunRecord
from atoll.proof import retention
from atoll.protocol.messages import Identity, RegisterReply, RegisterRequest, Status
from atoll.protocol.sharded import (
    BoundaryReply,
    BoundaryRequest,
    GroupReply,
    GroupRequest,
    MissingReport,
    PartReply,
    PartReport,
    SaveReply,
    SaveReport,
)

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class ShardedCoordinator(Authority):
    """The authority of a run whose ranks meet at every step. Thread-safe."""

    run: RunRecord
    blobs: Blobs
    intervals: Intervals
    groups: Groups
    saves: Saves
    boundaries: Boundaries
    checkpoints: Checkpoints
    hashes: Hashes
    damages: Damages
    report: ShardedReport

    @property
    def parts(self) -> Sequence[Part]:
        return self.intervals.dispatch.parts

    def _published(self) -> tuple[int, str]:
        return self.report.newest()

    @property
    def digest(self) -> str:
        return self.report.newest()[1]

    def _joined(self, worker_id: str) -> None:
        self.groups.forget(worker_id)

    def _steps(self, worker_id: str) -> int:  # noqa: ARG002  # the group's are the boundary's to say
        return 0

    def _resumes(self) -> None:
        pass

    def _go_on(self) -> bool:
        self.damages.look()
        self.groups.advance()
        return self.checkpoints.commit_due()

    def is_due(self) -> bool:
        return self.checkpoints.is_due()

    def is_finished(self) -> bool:
        return self.intervals.is_finished()

    def save(self) -> None:
        """Nothing is owed: checkpoints are the ranks' to make."""

    def status(self) -> Status:
        return self.report.status()

    # Workers

    def register(self, request: RegisterRequest, *, peer: str = "") -> RegisterReply:
        """As in every run; the certificate must be one that the others can trust."""
        with self.refusals():
            certificates.check(request, self.registry.generation.members)
        return super().register(request, peer=peer)

    # Groups

    def group(self, request: GroupRequest, *, begun: bool = False) -> GroupReply:
        """Which group the sender is in; `begun` says that this is the same request again."""
        with self.refusals():
            self._enter(request.identity, begun=begun)
            return self.groups.answer(request, begun=begun)

    def saved(self, report: SaveReport) -> SaveReply:
        """The sender has saved its shard, and its predecessor's."""
        with self.refusals():
            self._enter(report.identity)
            return self.saves.report(report)

    def part(self, report: PartReport, *, begun: bool = False) -> PartReply:
        """The sender's part of a checkpoint is uploaded; whether the checkpoint is recorded."""
        with self.refusals():
            self._enter(report.identity, begun=begun)
            return self.checkpoints.report(report)

    def boundary(self, request: BoundaryRequest, *, begun: bool = False) -> BoundaryReply:
        """How the sender's group goes on after a round."""
        with self.refusals():
            self._enter(request.identity, begun=begun)
            return self.boundaries.answer(request)

    def missing(self, report: MissingReport) -> None:
        """The sender did not reach others of its group."""
        with self.refusals():
            self._enter(report.identity)
            self.groups.missing(report)

    def _enter(self, identity: Identity, *, begun: bool = False) -> None:
        if begun:
            self.registry.check(identity)
        else:
            self.membership.enter(identity)
        self.heartbeats.hear(identity.worker_id)

    # Transfers

    def part_offset(self, request: PartRequest) -> int:
        """Where an upload of this part resumes."""
        with self.refusals():
            self._enter(request.identity)
            return self.checkpoints.uploads.offset(request)

    def begin_part(self, request: PartRequest) -> PartStream | None:
        """Checks everything that can be checked without a body; None when it is stored already."""
        with self.refusals():
            self._enter(request.identity)
            return self.checkpoints.uploads.begin(request)

    def write_part(self, stream: PartStream, chunk: bytes | memoryview) -> None:
        """Takes the next bytes of a part; progress counts as a sign of life."""
        with self.refusals():
            self.checkpoints.uploads.write(stream, chunk)
        self.heartbeats.hear(stream.upload.request.identity.worker_id)
        self.counters.add("bytes_received", len(chunk))

    def commit_part(self, stream: PartStream) -> None:
        """The part is whole; returns once it is durable."""
        with self.refusals():
            self.checkpoints.uploads.commit(stream)

    def fetch(self, identity: Identity, sha256: str, offset: int, nbytes: int) -> BlobReader:
        """A reader of the initial weights or of a checkpoint's part, or of the hashes of either.

        The hashes of a part are asked for by its root, the leaves of the initial weights by their
        digest, and the bytes themselves by their sha256.

        BlobMissing for every other blob, ProtocolError for bytes outside it. The caller closes it.
        """
        with self.refusals():
            self._enter(identity)
            with self.ledger.reading() as t:
                kept = retention.kept_checkpoints(t, retention.storage_of(t))
            reader = self._opened(sha256, kept)
            if offset + nbytes > reader.nbytes:
                reader.close()
                raise ProtocolError(
                    f"{nbytes} bytes from {offset} were asked of {sha256}, which has "
                    f"{reader.nbytes}; a range lies inside"
                )
            return reader

    def _opened(self, name: str, kept: Sequence[CheckpointRecord]) -> BlobReader:
        if name == self.run.initial_sha256 or any(name in c.blobs for c in kept):
            return self._heeded(name, lambda: self.blobs.open(name))
        if name == self.manifests.first.manifest.model.initial_digest:
            blob = self.run.initial_sha256
            return self._heeded(blob, lambda: self.hashes.of_initial(name, blob))
        for checkpoint in kept:
            if name in checkpoint.parts:
                blob = checkpoint.blobs[checkpoint.parts.index(name)]
                return self._heeded(blob, partial(self.hashes.of_part, name, blob))
        raise BlobMissing(
            f"sha256={name!r} is neither the initial weights nor part of a checkpoint that is "
            f"kept; ask for a group and restore what it says"
        )

    def _heeded(self, blob: str, opened: Callable[[], BlobReader]) -> BlobReader:
        """What `opened` gives; a blob that is damaged is remembered: no group goes back to it."""
        try:
            return opened()
        except LOST as error:
            self.damages.note(blob, error)
            raise
