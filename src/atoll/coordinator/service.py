"""The coordinator of a run in rounds of contributions, as one object without any transport.

Composes assignments, rounds, versions, uploads and closing on top of what every run has. Adapters
(HTTP, gRPC, in-memory) translate; they decide nothing. All methods are synchronous and thread-safe;
`advance` belongs to one thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import Uploads, UploadStream
from atoll.coordinator.authority import Authority
from atoll.coordinator.pull import windows
from atoll.coordinator.pull.pulls import Pulls
from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.closing import Closing
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.coordinator.rounds.spool import SpooledFrame
from atoll.coordinator.shown.status import Report
from atoll.data.parts import Part
from atoll.errors import ProtocolError
from atoll.ledger.records import ContributionRecord
from atoll.protocol.control import OuterRateReply
from atoll.protocol.gather import AnnounceReply, AnnounceRequest, WindowReply, WindowRequest
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    Identity,
    Status,
)
from atoll.versions import manifest_change

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Coordinator(Authority):
    """The authority of a run whose islands hand in contributions. Thread-safe."""

    rounds: Rounds
    weights: RunWeights
    uploads: Uploads
    assignments: Assignments
    snapshots: Snapshots
    closing: Closing
    report: Report
    pulls: Pulls | None = None  # where islands publish

    @property
    def parts(self) -> Sequence[Part]:
        return self.rounds.dispatch.parts

    def _published(self) -> tuple[int, str]:
        current = self.weights.current
        return current.version, current.digests.published.root

    @property
    def digest(self) -> str:
        return self.weights.current.digests.master.root

    def _joined(self, worker_id: str) -> None:
        self.assignments.forget(worker_id)
        self.rounds.admit()

    def _steps(self, worker_id: str) -> int:
        return self.rounds.steps(worker_id)

    def _resumes(self) -> None:
        self.rounds.restart_deadlines()

    def is_due(self) -> bool:
        return self.closing.is_due()

    def is_finished(self) -> bool:
        return self.rounds.is_finished()

    def save(self) -> None:
        self.snapshots.save()

    def status(self) -> Status:
        return self.report.status()

    # Rounds

    def assignment(self, request: AssignmentRequest, *, begun: bool = False) -> Assignment:
        """What the worker does next; `wait` when nothing is to be done yet.

        `begun` says that this is the same request looked at again: its generation was checked.
        """
        with self.refusals():
            if begun:
                self.registry.check(request.identity)
            else:
                self.membership.enter(request.identity)
            self.heartbeats.hear(request.identity.worker_id)
            reply = self.assignments.answer(request)
        return reply.model_copy(update={"generation": self.generation})

    def evaluation(self, report: EvaluationReport) -> None:
        """Takes the share of a version's held-out loss that the worker was asked for."""
        with self.refusals():
            self.membership.enter(report.identity)
            self.assignments.take_evaluation(report)

    def _go_on(self) -> bool:
        # Whoever is kept from handing in, by a full disk or a pause, must not lose rows over it.
        is_paused = self.operator.command.action == "pause"
        for worker_id in [] if is_paused else self.rounds.expire():
            self.counters.add("expired_leases")
            log.warning("lease expired", extra={"worker": worker_id})
            self.changed()
        if self.rounds.admit():
            self.changed()
        if self.pulls is not None:
            self.pulls.tick()
        self.snapshots.catch_up()
        return self.closing.close_due()

    # What islands publish

    def announce(self, request: AnnounceRequest, *, begun: bool = False) -> AnnounceReply:
        """Pulls an announced contribution when it is its turn; the receipt once it is accepted.

        `begun` as in `assignment`.
        """
        with self.refusals():
            pulls = self._publishing(type(request).__name__)
            if begun:
                self.registry.check(request.identity)
            else:
                self.membership.enter(request.identity)
            self.heartbeats.hear(request.identity.worker_id)
            return pulls.announce(request)

    def window(self, request: WindowRequest) -> WindowReply:
        """What a published round folded, and where each of it was published."""
        with self.refusals():
            self._publishing(type(request).__name__)
            self.membership.enter(request.identity)
            return windows.window(self.rounds, self.weights, request.round)

    def _publishing(self, name: str) -> Pulls:
        """Refuses a message of runs in which islands publish."""
        if self.pulls is None:
            raise ProtocolError(
                f"{name} is not a message of run {self.run_id!r}, in which contributions are "
                f"uploaded; fetch /info and speak as its strategy asks"
            )
        return self.pulls

    # Transfers

    def upload_offset(self, request: UploadRequest) -> int:
        """Where an upload of this frame resumes."""
        with self.refusals():
            self.membership.enter(request.identity)
            self._check_uploads()
            return self.uploads.offset(request)

    def begin_upload(self, request: UploadRequest) -> UploadStream | ContributionRecord:
        """Checks everything that can be checked without a body."""
        with self.refusals():
            self.membership.enter(request.identity)
            self._check_uploads()
            found = self.uploads.begin(request)
            self.heartbeats.hear(request.identity.worker_id)
            return found

    def _check_uploads(self) -> None:
        """Refuses what nobody stated: other islands could not gather it."""
        if self.pulls is not None:
            raise ProtocolError(
                f"contributions to run {self.run_id!r} are pulled from buckets; publish it and "
                f"announce it"
            )

    def write_upload(self, stream: UploadStream, chunk: bytes | memoryview) -> None:
        """Takes the next bytes of a frame; progress counts as a sign of life."""
        with self.refusals():
            self.uploads.write(stream, chunk)
        self.heartbeats.hear(stream.upload.request.identity.worker_id)
        self.counters.add("bytes_received", len(chunk))

    def commit_upload(self, stream: UploadStream) -> ContributionRecord:
        """Validates, stores and records; returns once the contribution is durable."""
        with self.refusals():
            record = self.uploads.commit(stream)
        log.info(
            "contribution accepted",
            extra={"round": record.round, "worker": record.worker_id, "norm": record.norm},
        )
        self.changed()
        return record

    def download(self, identity: Identity, *, round_number: int, have_digest: str) -> SpooledFrame:
        """The frame of a round for a worker that lacks it, or the current weights whole."""
        with self.refusals():
            self.membership.enter(identity)
            self.heartbeats.hear(identity.worker_id)
            return self.weights.frame_for(round_number=round_number, have_digest=have_digest)

    # The operator

    def set_outer_lr(self, lr: float) -> OuterRateReply:
        """Records another outer learning rate, as a manifest version from a later round on.

        Rounds that are planned keep theirs, so contributions made or under way stay good. Islands
        learn of it when that round is planned. ConfigError for a rate that breaks its rule.
        """
        with self.refusals():
            made = self.rounds.add_manifest(partial(manifest_change.with_outer_lr, lr=lr))
        log.info(
            "outer learning rate changed",
            extra={"lr": lr, "from_round": made.from_round, "manifest": made.sha256},
        )
        return OuterRateReply(
            lr=made.manifest.outer.lr, from_round=made.from_round, manifest_sha256=made.sha256
        )
