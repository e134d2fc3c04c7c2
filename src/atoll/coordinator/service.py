"""The coordinator as one object: what each message does, without any transport.

Composes registry, rounds, versions and uploads. Adapters (HTTP, gRPC, in-memory) translate; they
decide nothing. All methods are synchronous and thread-safe; `advance` belongs to one thread.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.coordinator import agreement, queues, readiness
from atoll.coordinator.admission import Admission, UploadRequest
from atoll.coordinator.barriers import Barriers
from atoll.coordinator.control import Control
from atoll.coordinator.evaluation import Evaluation
from atoll.coordinator.heartbeats import Heartbeats
from atoll.coordinator.liveness import Liveness
from atoll.coordinator.presence import Presence, Stream
from atoll.coordinator.reach import DIALLING, Reach
from atoll.coordinator.readiness import Roster
from atoll.coordinator.registry import Registry
from atoll.coordinator.report import Report
from atoll.coordinator.room import Room
from atoll.coordinator.rounds import LatestRound, Rounds
from atoll.coordinator.samples import SampleStore
from atoll.coordinator.spool import Spool, SpooledFrame
from atoll.coordinator.uploads import Uploads, UploadStream
from atoll.coordinator.versions import Versions
from atoll.errors import AtollError, DiskFailed, ProtocolError, StaleContribution, StorageFull
from atoll.history import boundary, retention
from atoll.history.manifests import Manifests, Recorded
from atoll.layout import Layout
from atoll.ledger import chain
from atoll.ledger.base import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    GenerationRecord,
    Published,
    RoundState,
)
from atoll.protocol.control import Action, ControlReply, OuterRateReply
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    BarrierReply,
    BarrierRequest,
    EvaluationReport,
    EvaluationTask,
    HeartbeatReply,
    HeartbeatRequest,
    Identity,
    Info,
    Ready,
    RegisterReply,
    RegisterRequest,
    RowRange,
    Status,
    Workers,
)
from atoll.protocol.samples import SamplesRequest
from atoll.protocol.work import Work

log = logging.getLogger(__name__)


def _ranges(latest: LatestRound, worker_id: str) -> tuple[RowRange, ...]:
    return tuple(
        RowRange(start=lease.start, stop=lease.stop, dataset_id=lease.dataset_id)
        for lease in latest.ranges(worker_id)
    )


class Coordinator:
    """One run's authority."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: Blobs,
        spool: Spool,
        clock: Clock,
        *,
        layout: Layout,
        samples: SampleStore | None = None,
        threads: int = 1,
        reach: Reach | None = None,
    ) -> None:
        run = ledger.run()
        assert run is not None, "boot creates the run before the coordinator opens it"
        self.layout = layout
        self.run_id = run.run_id
        self.transfer_port = 0
        self.samples = SampleStore() if samples is None else samples
        self.counters: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._clock = clock
        self._ledger = ledger
        self._blobs = blobs
        self._run = run
        self._listeners: list[Callable[[], None]] = []
        self.manifests = Manifests.of(ledger)
        manifest = self.manifests.newest.manifest  # here only for what no version changes
        self._heartbeats = Heartbeats(clock, timeout_seconds=manifest.heartbeat_timeout)
        self._registry = Registry(
            ledger,
            self._heartbeats,
            clock,
            run_id=run.run_id,
            manifest=lambda: self._rounds.in_force.sha256,
        )
        self._control = Control(ledger)
        self._finish_kicks()
        self._presence = Presence(clock)
        self._liveness = Liveness(self._registry, self._heartbeats, self._presence)
        self._barriers = Barriers(on_complete=self._changed)
        self._reach = reach or Reach(clock)
        self._rounds = Rounds(ledger, self._registry, clock, manifests=self.manifests)
        self._heartbeats.timeout_seconds = self.manifest.heartbeat_timeout
        self._roster = Roster(
            self._registry,
            self._heartbeats,
            self._presence,
            heartbeat_interval=manifest.heartbeat_interval,
        )
        self.versions = Versions(
            ledger,
            blobs,
            spool,
            manifests=self.manifests,
            layout=layout,
            run_id=run.run_id,
            threads=threads,
        )
        admission = Admission(
            self._registry,
            self._rounds,
            self.versions,
            manifests=self.manifests,
            layout=layout,
            block=int(manifest.data.identity["block"]),
        )
        self._uploads = Uploads(blobs, admission, clock, record=self._rounds.accept)
        self._evaluation = Evaluation(
            ledger,
            manifest=lambda: self.manifest,
            held_out_rows=int(manifest.data.identity["held_out_rows"]),
            block=int(manifest.data.identity["block"]),
        )
        self._room = Room(blobs, clock, needed_bytes=layout.size * 4)
        self._owes_snapshot = False
        self._disk_failure: DiskFailed | None = None
        self._report = Report(ledger, self._registry, self._heartbeats, self._rounds)
        self._begun: dict[str, int] = {}  # the round that each worker was last given, to show
        self._counting = threading.Lock()

    # The manifest

    @property
    def manifest(self) -> Manifest:
        """The one in force: that of the latest round."""
        return self._rounds.in_force.manifest

    def change_outer_lr(self, lr: float) -> int:
        """Records another outer learning rate; returns the first round that it counts for.

        Rounds that are planned keep theirs, so contributions made or under way stay good. Islands
        learn of it when that round is planned. ConfigError for a rate that breaks its rule.
        """
        return self._with_outer_lr(lr).from_round

    def _with_outer_lr(self, lr: float) -> Recorded:
        changed = self._rounds.add_manifest(lambda newest: boundary.with_outer_lr(newest, lr))
        log.info(
            "outer learning rate changed",
            extra={"lr": lr, "from_round": changed.from_round, "manifest": changed.sha256},
        )
        return changed

    # Workers

    def info(self) -> Info:
        """The manifest in force, whole, and where the data plane is."""
        found = self._rounds.in_force
        return Info.model_validate(
            {
                **{name: getattr(found.manifest, name) for name in Manifest.model_fields},
                "run_id": self.run_id,
                "manifest_sha256": found.sha256,
                "model_hash": self.layout.digest,
                "version": self.versions.current.version,
                "transfer_port": self.transfer_port,
            }
        )

    def register(self, request: RegisterRequest, *, peer: str = "") -> RegisterReply:
        """Takes a worker in, if its model and data are the run's; a new generation.

        `peer` is the address the request came from.
        """
        with self._refusals():
            self._control.check(request.worker_id)
            agreement.check(request, self._rounds.in_force, self.manifests, layout=self.layout)
            if self.manifest.strategy in DIALLING:
                self._reach.check(request.worker_id, request.ip_address or peer, request.port)
            record = self._registry.register(
                request, peer=peer, check=lambda: self._control.check(request.worker_id)
            )
            self._begun.pop(request.worker_id, None)
            # A stream of an earlier life says nothing about this one.
            self._presence.forget(request.worker_id, record.incarnation - 1)
            self._rounds.admit()
            current = self.versions.current
        log.info(
            "worker registered",
            extra={"worker": request.worker_id, "incarnation": record.incarnation},
        )
        self._changed()
        return RegisterReply(
            incarnation=record.incarnation,
            generation=self._registry.generations.current.number,
            version=current.version,
            digest=current.digests.published.root,
        )

    def deregister(self, identity: Identity) -> None:
        """Lets a worker go; the round no longer waits for it."""
        with self._refusals():
            self._enter(identity)
            self._registry.deregister(identity)
        self._presence.forget(identity.worker_id, identity.incarnation)
        log.info("worker left", extra={"worker": identity.worker_id})
        self._changed()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A sign of life and what the worker tells about itself."""
        with self._refusals():
            generation = self._enter(request.identity)
            self._heartbeats.hear(request.identity.worker_id, request.telemetry)
            self._control.acknowledge(request.identity.worker_id, request.acknowledged)
        return HeartbeatReply(
            generation=generation.number,
            command=self._control.command,
        )

    def keep_samples(self, request: SamplesRequest) -> None:
        """Keeps what a worker measured; a sign of life, also when there is no room to keep it."""
        identity = request.identity
        with self._refusals():
            self._enter(identity)
            self._heartbeats.hear(identity.worker_id)
            if request.life > identity.incarnation:
                raise ProtocolError(
                    f"life={request.life} of the samples is after incarnation="
                    f"{identity.incarnation} of worker_id={identity.worker_id!r}; it is the "
                    f"incarnation under which the process first handed samples in"
                )
            self.samples.add(identity.worker_id, request.life, request.samples)

    def _enter(self, identity: Identity) -> GenerationRecord:
        """Who speaks, in which life and generation; refused before anything else is looked at.

        A message belongs to the generation in which it began: what takes long is not asked again.
        """
        self._registry.check(identity)
        return self._registry.generations.check(identity.generation)

    def attend(self, identity: Identity, *, close: Callable[[], None]) -> Stream:
        """A presence stream begins; `close` ends it from this side, from any thread."""
        with self._refusals():
            self._enter(identity)
            self._heartbeats.hear(identity.worker_id)
            stream = self._presence.open(identity.worker_id, identity.incarnation, close)
            try:
                # That life may have ended in between; its stream would hide the end of the next.
                self._registry.check(identity)
            except AtollError:
                self._presence.forget(identity.worker_id, identity.incarnation)
                raise
            return stream

    def absent(self, stream: Stream) -> None:
        """A presence stream ended; harmless when repeated."""
        if self._presence.lose(stream):
            log.info("presence lost", extra={"worker": stream.worker_id})
            self._changed()

    def stop_watching(self) -> None:
        """The transports close: what ends from now on is no sign of a death."""
        self._presence.stop()

    def workers(self) -> Workers:
        """Every worker that ever registered, and how it fares."""
        return self._roster.workers(self._reach.pings_ms())

    def ready(self, min_workers: int | None = None) -> Ready:
        """Whether so many workers are in (the manifest's `min_workers` if none is given)."""
        wanted = self.manifest.membership.min_workers if min_workers is None else min_workers
        found = readiness.ready(self._registry.generations.current, min_workers=wanted)
        return found.model_copy(update={"ready": False}) if self._room.reason else found

    def check_health(self) -> None:
        """StorageFull while the disk has no room."""
        self._room.check()

    @property
    def generation(self) -> int:
        """The number that messages carry now."""
        return self._registry.generations.current.number

    def barrier(self, number: int, name: str, request: BarrierRequest) -> BarrierReply:
        """The worker has come to a barrier of its generation; says who is missing."""
        identity = request.identity
        with self._refusals():
            if number != identity.generation:
                raise ProtocolError(
                    f"the path names generation {number}, the body {identity.generation}; "
                    f"they must agree"
                )
            generation = self._enter(identity)
            self._heartbeats.hear(identity.worker_id)
            return self._barriers.arrive(generation, name, identity.worker_id)

    # Rounds

    def assignment(self, request: AssignmentRequest, *, begun: bool = False) -> Assignment:
        """What the worker does next; `wait` when nothing is to be done yet.

        `begun` says that this is the same request looked at again: its generation was checked.
        """
        with self._refusals():
            if begun:
                self._registry.check(request.identity)
            else:
                self._enter(request.identity)
            self._heartbeats.hear(request.identity.worker_id)
        reply = self._assignment(request)
        return reply.model_copy(update={"generation": self.generation})

    def _assignment(self, request: AssignmentRequest) -> Assignment:
        current = self.versions.current
        digest = current.digests.published.root
        if request.version != current.version or request.digest != digest:
            if request.version == current.version and request.digest is not None:
                self._count("resyncs")
                log.warning(
                    "worker holds other weights, sent to fetch",
                    extra={"worker": request.identity.worker_id, "digest": request.digest},
                )
            return Assignment(action="fetch", version=current.version, digest=digest)
        reply = self._next(request.identity.worker_id, current.version, digest)
        if self.versions.current is not current:
            # A round was published meanwhile: the answer may belong to the version after it.
            return Assignment(action="fetch", version=current.version, digest=digest)
        return reply

    def _next(self, worker_id: str, version: int, digest: str) -> Assignment:
        latest = self._rounds.latest
        finished = self._rounds.is_finished()
        task = self._evaluation_task(worker_id, version)
        if finished:
            return Assignment(
                action="stop",
                version=version,
                digest=digest,
                evaluation=task,
                reason="the run is finished",
            )
        wanted = self._control.command.action
        if wanted == "stop":
            reason = "the operator stops the run"
            return Assignment(action="stop", version=version, digest=digest, reason=reason)
        if latest is None or latest.record.state is not RoundState.OPEN:
            return self._planned(latest, worker_id).model_copy(
                update={"version": version, "digest": digest}
            )
        if worker_id not in latest.holding or worker_id in latest.contributions:
            return Assignment(action="wait", version=version, digest=digest)
        if wanted == "pause":
            reason = "the operator has paused the run"
            return Assignment(action="wait", version=version, digest=digest, reason=reason)
        self._begun[worker_id] = latest.record.round
        return self._train(latest, worker_id).model_copy(
            update={"version": version, "digest": digest, "evaluation": task}
        )

    def _planned(self, latest: LatestRound | None, worker_id: str) -> Assignment:
        """`wait`, with the rows of the next round where there are some."""
        reply = Assignment(action="wait", version=0, digest="0" * 64)
        if latest is None or latest.record.state is not RoundState.PLANNED:
            return reply
        ranges = _ranges(latest, worker_id)
        known = {"upcoming": latest.record.round, "upcoming_ranges": ranges}
        return reply.model_copy(update=known) if ranges else reply

    def _evaluation_task(self, worker_id: str, version: int) -> EvaluationTask | None:
        latest = self._rounds.latest
        if latest is None:
            return None
        return self._evaluation.task(
            worker_id,
            version=version,
            members=sorted(latest.planned),
            final=self._rounds.is_finished(),
        )

    def _train(self, latest: LatestRound, worker_id: str) -> Assignment:
        return Assignment(
            action="train",
            version=0,
            digest="0" * 64,
            round=latest.record.round,
            manifest_sha256=latest.record.manifest_sha256,
            ranges=_ranges(latest, worker_id),
            global_tokens=self._rounds.tokens,
            num_planned=len(latest.holding),
        )

    def evaluation(self, report: EvaluationReport) -> None:
        """Takes the share of a version's held-out loss that the worker was asked for."""
        worker_id, version = report.identity.worker_id, self.versions.current.version
        with self._refusals():
            self._enter(report.identity)
            asked = self._evaluation.has_asked(worker_id, version=report.version)
            if report.version == version and not asked:
                # An earlier life of the coordinator asked: the same share, unless others came.
                self._evaluation_task(worker_id, version)
            self._evaluation.check(report)
            self._evaluation.add(report)

    def advance(self) -> bool:
        """Does what is due: evicts, fills up a short round, closes a round; whether one closed.

        A full disk is waited for: what found no room is tried again once there is some. When this
        raises, the weights in memory may be torn or the disk has failed: the process must end and
        start again.
        """
        if self._disk_failure is not None:
            raise self._disk_failure
        try:
            return self._advance()
        except StorageFull as error:
            self._room.ran_out(error)
            return False

    def _advance(self) -> bool:
        self._heartbeats.timeout_seconds = self.manifest.heartbeat_timeout
        if self._liveness.scan():
            self._changed()
        was_full = bool(self._room.reason)
        if not self._room.is_there():
            return False
        if was_full:
            self._rounds.restart_deadlines()
        # Whoever is kept from handing in, by a full disk or a pause, must not lose rows over it.
        is_paused = self._control.command.action == "pause"
        for worker_id in [] if is_paused else self._rounds.expire():
            self._count("expired_leases")
            log.warning("lease expired", extra={"worker": worker_id})
            self._changed()
        self._rounds.admit()
        if self._owes_snapshot:
            self._save_snapshot()
        frozen = self._frozen_round()
        if frozen is None:
            if not self._rounds.is_due():
                return False
            latest = self._rounds.latest
            assert latest is not None
            frozen = latest.record.round
            self._rounds.freeze()
            self._uploads.drop_all()
            log.info("round frozen", extra={"round": frozen})
            self._changed()  # islands may read the rows of the next round meanwhile
        self._close(frozen)
        return True

    def _frozen_round(self) -> int | None:
        frozen = self._rounds.frozen
        return frozen if frozen == self.versions.current.version + 1 else None

    def _close(self, round_number: int) -> None:
        began = self._clock.now()
        contributions = self._ledger.contributions(round_number)
        digests = self.versions.compute(round_number, contributions)
        computed = self._clock.now()
        prev_hash = self._chain_head(round_number)
        published = Published(
            prev_hash=prev_hash,
            hash=chain.round_hash(
                prev_hash=prev_hash,
                round_number=round_number,
                manifest_sha256=self.manifests.of_round(round_number).sha256,
                contributions=contributions,
                master_digest=digests.master.root,
                published_digest=digests.published.root,
            ),
            master_digest=digests.master.root,
            published_digest=digests.published.root,
            leaves=digests.master.leaves,
            published_leaves=(
                None if digests.published is digests.master else digests.published.leaves
            ),
            published_wall=self._clock.wall(),
        )
        self._ledger.publish(round_number, published)
        self.versions.publish(round_number, digests)
        self._rounds.refresh()
        log.info(
            "round closed",
            extra={
                "round": round_number,
                "accepted": len(contributions),
                "digest": digests.master.root,
                "compute_seconds": round(computed - began, 4),
                "record_seconds": round(self._clock.now() - computed, 4),
            },
        )
        self._changed()
        self._snapshot(round_number)

    def _chain_head(self, round_number: int) -> str:
        if round_number == 1:
            first = self.manifests.first.sha256
            return chain.genesis_hash(self.run_id, first, self._run.initial_sha256)
        [before] = self._ledger.rounds(first=round_number - 1, last=round_number - 1)
        assert before.hash is not None
        return before.hash

    def _snapshot(self, version: int) -> None:
        storage = self.manifests.of_round(version).manifest.storage
        if version % storage.snapshot_every == 0 or self._rounds.is_finished():
            self._owes_snapshot = True
            try:
                self._save_snapshot()
            except StorageFull as error:
                self._room.ran_out(error)  # the round is published all the same

    def _save_snapshot(self) -> None:
        """Writes the snapshot that is due; before the next round is computed, while it can be."""
        self._add_snapshot()
        storage = self.manifests.of_round(self.versions.current.version).manifest.storage
        retention.prune(self._ledger, self._blobs, storage, in_flight=self._uploads.in_flight)
        self._owes_snapshot = False

    def _add_snapshot(self) -> None:
        version = self.versions.current.version
        newest = self._ledger.snapshots()[-1:]
        if version and not (newest and newest[0].version == version):
            self._ledger.add_snapshot(self.versions.snapshot())

    # Transfers

    def upload_offset(self, request: UploadRequest) -> int:
        """Where an upload of this frame resumes."""
        with self._refusals():
            self._enter(request.identity)
            return self._uploads.offset(request)

    def begin_upload(self, request: UploadRequest) -> UploadStream | ContributionRecord:
        """Checks everything that can be checked without a body."""
        with self._refusals():
            self._enter(request.identity)
            found = self._uploads.begin(request)
            self._heartbeats.hear(request.identity.worker_id)
            return found

    def write_upload(self, stream: UploadStream, chunk: bytes | memoryview) -> None:
        """Takes the next bytes of a frame; progress counts as a sign of life."""
        with self._refusals():
            self._uploads.write(stream, chunk)
        self._heartbeats.hear(stream.upload.request.identity.worker_id)
        self._count("bytes_received", len(chunk))

    def commit_upload(self, stream: UploadStream) -> ContributionRecord:
        """Validates, stores and records; returns once the contribution is durable."""
        with self._refusals():
            record = self._uploads.commit(stream)
        log.info(
            "contribution accepted",
            extra={"round": record.round, "worker": record.worker_id, "norm": record.norm},
        )
        self._changed()
        return record

    def download(self, identity: Identity, *, have_digest: str) -> SpooledFrame:
        """The frame that brings the worker to the current version."""
        with self._refusals():
            self._enter(identity)
            self._heartbeats.hear(identity.worker_id)
            return self.versions.frame_for(have_digest=have_digest)

    def sent(self, identity: Identity, nbytes: int) -> None:
        """Progress of a download: a sign of life."""
        self._heartbeats.hear(identity.worker_id)
        self._count("bytes_sent", nbytes)

    # The operator

    def control(self) -> ControlReply:
        """The command in force, and who knows of it."""
        live = sorted(self._registry.live())
        return ControlReply(
            command=self._control.command,
            acknowledged=tuple(w for w in live if self._control.acknowledged(w)),
            missing=tuple(w for w in live if not self._control.acknowledged(w)),
            kicked=self._control.kicked,
        )

    def order(self, action: Action) -> ControlReply:
        """Run, pause after this round, or stop after it and save."""
        if self._control.command.action == "pause":
            # Before the order: no lease ends between the two.
            self._rounds.restart_deadlines()
        command = self._control.order(action)
        log.info("operator", extra={"action": command.action, "number": command.number})
        self._changed()
        return self.control()

    def kick(self, worker_id: str) -> ControlReply:
        """Takes a worker out at once and keeps it out; rounds no longer wait for it."""
        with self._refusals():
            self._registry.must_know(worker_id)
            # Kept out first: it must not slip in again in between.
            self._control.kick(worker_id, wall=self._clock.wall())
            incarnation = self._registry.remove(worker_id)
        self._presence.forget(worker_id, incarnation)
        log.info("operator took a worker out", extra={"worker": worker_id})
        self._changed()
        return self.control()

    def _finish_kicks(self) -> None:
        """Takes out who was to be kept out when an earlier life ended between the two."""
        for worker_id in self._control.kicked:
            if any(worker.worker_id == worker_id for worker in self._registry.active()):
                self._registry.remove(worker_id)

    def allow(self, worker_id: str) -> ControlReply:
        """Lets a worker in again."""
        self._control.allow(worker_id)
        log.info("operator allows a worker", extra={"worker": worker_id})
        return self.control()

    def set_outer_lr(self, lr: float) -> OuterRateReply:
        """A new outer learning rate, as a manifest version from a later round on."""
        with self._refusals():
            made = self._with_outer_lr(lr)
        return OuterRateReply(
            lr=made.manifest.outer.lr, from_round=made.from_round, manifest_sha256=made.sha256
        )

    def is_stopping(self) -> bool:
        """Whether the operator has asked for the end."""
        return self._control.command.action == "stop"

    def end_stop(self) -> None:
        """The stop is carried out: saves, and the next start goes on."""
        self.save()
        self._control.end()

    def save(self) -> None:
        """Writes a snapshot of the newest version, unless there is one; when nothing closes."""
        if not self.versions.is_settled:
            return  # a round was computed and found no room to be recorded: the next start does it
        try:
            self._add_snapshot()
        except StorageFull as error:
            log.warning("no room for a snapshot", extra={"reason": str(error)})

    # People

    def status(self) -> Status:
        """What an operator sees."""
        current = self.versions.current
        return self._report.status(
            run_id=self.run_id,
            manifest=self.manifest,
            manifest_sha256=self._rounds.in_force.sha256,
            version=current.version,
            digest=current.digests.master.root,
            begun=self._begun if self._control.command.action == "pause" else None,
            counters=self.counters,
            refusals=self.refusals,
            storage_full=self._room.reason,
        )

    def work(self) -> Work:
        """The queues of units, and who has which rows."""
        return queues.work(
            self._ledger,
            self._rounds.dispatch.parts,
            self.manifest.work,
            expired_leases=self.counters["expired_leases"],
        )

    def is_finished(self) -> bool:
        """Whether the last round is published."""
        return self._rounds.is_finished()

    def is_closing(self) -> bool:
        """Whether a round is due or being computed."""
        return self._frozen_round() is not None or self._rounds.is_due()

    def members(self) -> list[str]:
        """Workers that are registered and heard from, in order."""
        return sorted(self._registry.live())

    def state_hash(self) -> str:
        """Hash of the durable state; a refused message leaves it as it was."""
        return self._ledger.state_hash()

    def copy_ledger(self, path: str) -> None:
        """Writes a consistent copy of the ledger."""
        self._ledger.copy_to(path)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` (from any thread) whenever a waiting worker may have something to do."""
        self._listeners.append(listener)

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        """Calls `tell` once, from any thread, when another coordinator has taken over."""
        self._ledger.on_lost(tell)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _count(self, name: str, amount: int = 1) -> None:
        with self._counting:
            self.counters[name] += amount

    def refused(self, error: AtollError) -> None:
        """Counts a refusal; adapters call it for what they refuse before a message gets here."""
        with self._counting:
            self.refusals[error.code] += 1
            if isinstance(error, StaleContribution):
                self.counters["stale_contributions"] += 1

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except AtollError as exc:
            self.refused(exc)
            if isinstance(exc, StorageFull):
                self._room.ran_out(exc)
            if isinstance(exc, DiskFailed):
                self._disk_failure = exc
                self._changed()  # `advance` ends the process
            raise
