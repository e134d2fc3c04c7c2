"""What the coordinator of every run does, whatever its strategy, without any transport.

Settings, membership, presence, barriers, samples and the operator's orders: one method for each
message, and what is refused is counted. What becomes of the weights is for who derives from it.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll.coordinator.changes import Changes
from atoll.coordinator.counters import Counters
from atoll.coordinator.members import liveness, readiness
from atoll.coordinator.members.barriers import Barriers
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.members.presence import Presence, Stream
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.shown import queues
from atoll.coordinator.shown.samples import SampleStore
from atoll.data.parts import Part
from atoll.errors import AtollError, DiskFailed, ProtocolError, StorageFull
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.protocol.control import Action, ControlReply
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    BarrierReply,
    BarrierRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Identity,
    Info,
    Ready,
    RegisterReply,
    RegisterRequest,
    Status,
    Workers,
)
from atoll.protocol.samples import SamplesRequest
from atoll.protocol.work import Work
from atoll.versions.manifests import Manifests

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Authority(ABC):
    """One run's authority. Thread-safe.

    Messages come from request threads. `advance` belongs to the one thread that closes rounds, and
    `end_stop` to whoever has ended it.
    """

    run_id: str
    layout: Layout
    ledger: Ledger
    manifests: Manifests
    samples: SampleStore
    counters: Counters
    changed: Changes
    heartbeats: Heartbeats
    registry: Registry
    operator: Control
    presence: Presence
    membership: Membership
    barriers: Barriers
    disk: DiskSpace
    transfer_port: int = 0
    _disk_failure: DiskFailed | None = field(default=None, init=False)

    # What depends on how the run trains

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The datasets that rows are issued of."""

    @abstractmethod
    def _published(self) -> tuple[int, str]:
        """The newest version and the digest of its published weights."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """The params digest of the newest version."""

    @abstractmethod
    def _joined(self, worker_id: str) -> None:
        """A worker, or a new life of one, was taken in."""

    @abstractmethod
    def _steps(self, worker_id: str) -> int:
        """How many inner steps the worker would be given if it asked now."""

    @abstractmethod
    def _resumes(self) -> None:
        """Nobody could work for a while; deadlines begin anew."""

    @abstractmethod
    def _go_on(self) -> bool:
        """Does what is due; whether a round closed."""

    @abstractmethod
    def is_due(self) -> bool:
        """Whether a round is due or being computed."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the last round is published."""

    @abstractmethod
    def save(self) -> None:
        """Makes the next start a quick one; while no round closes."""

    @abstractmethod
    def status(self) -> Status:
        """What an operator sees."""

    # Settings

    @property
    def version(self) -> int:
        """The newest version that is published."""
        return self._published()[0]

    @property
    def manifest(self) -> Manifest:
        """The manifest in force: that of the latest round."""
        return self.manifests.in_force.manifest

    def info(self, manifest_sha256: str | None = None) -> Info:
        """The manifest in force, or the version of that hash, and where the data plane is."""
        asked, known = manifest_sha256, self.manifests
        with self.refusals():
            found = known.in_force if asked is None else known.get(asked)
        return Info.model_validate(
            {
                **{name: getattr(found.manifest, name) for name in Manifest.model_fields},
                "run_id": self.run_id,
                "manifest_sha256": found.sha256,
                "model_hash": self.layout.digest,
                "version": self.version,
                "transfer_port": self.transfer_port,
            }
        )

    # Workers

    def register(self, request: RegisterRequest, *, peer: str = "") -> RegisterReply:
        """Takes a worker in, if its model and data are the run's; a new generation.

        `peer` is the address the request came from.
        """
        with self.refusals():
            record = self.membership.register(request, self.manifests.in_force, peer=peer)
            self._joined(request.worker_id)
            version, digest = self._published()
        log.info(
            "worker registered",
            extra={"worker": request.worker_id, "incarnation": record.incarnation},
        )
        self.changed()
        return RegisterReply(
            incarnation=record.incarnation,
            generation=self.registry.generation.number,
            version=version,
            digest=digest,
        )

    def deregister(self, identity: Identity) -> None:
        """Lets a worker go; nobody waits for it any more."""
        with self.refusals():
            self.membership.deregister(identity)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A sign of life and what the worker tells about itself."""
        with self.refusals():
            reply = self.membership.heartbeat(request)
        return reply.model_copy(update={"steps": self._steps(request.identity.worker_id)})

    def keep_samples(self, request: SamplesRequest) -> None:
        """Keeps what a worker measured; a sign of life, also when there is no room to keep it."""
        identity = request.identity
        with self.refusals():
            self.membership.enter(identity)
            self.heartbeats.hear(identity.worker_id)
            if request.life > identity.incarnation:
                raise ProtocolError(
                    f"life={request.life} of the samples is after incarnation="
                    f"{identity.incarnation} of worker_id={identity.worker_id!r}; it is the "
                    f"incarnation under which the process first handed samples in"
                )
            self.samples.add(identity.worker_id, request.life, request.samples)

    def attend(self, identity: Identity, *, close: Callable[[], None]) -> Stream:
        """A presence stream begins; `close` ends it from this side, from any thread."""
        with self.refusals():
            return self.membership.attend(identity, close=close)

    def absent(self, stream: Stream) -> None:
        """A presence stream ended; harmless when repeated."""
        self.membership.absent(stream)

    def workers(self) -> Workers:
        """Every worker that ever registered, and how it fares."""
        return readiness.workers(
            self.registry,
            self.presence,
            self.membership.dialback,
            heartbeat_interval=self.manifest.heartbeat_interval,
        )

    def ready(self, min_workers: int | None = None) -> Ready:
        """Whether so many workers are in (the manifest's `min_workers` if none is given)."""
        wanted = self.manifest.membership.min_workers if min_workers is None else min_workers
        found = readiness.ready(self.registry.generation, min_workers=wanted)
        return found.model_copy(update={"ready": False}) if self.disk.reason else found

    @property
    def generation(self) -> int:
        """The number that messages carry now."""
        return self.registry.generation.number

    def barrier(self, request: BarrierRequest) -> BarrierReply:
        """The worker has come to a barrier of its generation; says who is missing."""
        identity = request.identity
        with self.refusals():
            generation = self.membership.enter(identity)
            self.heartbeats.hear(identity.worker_id)
            return self.barriers.arrive(generation, request.name, identity.worker_id)

    # Time

    def advance(self) -> bool:
        """Does what is due: evicts, and what the run's strategy has to do; whether a round closed.

        A full disk is waited for: what found no room is tried again once there is some. When this
        raises, the weights in memory may be torn or the disk has failed: the process must end and
        start again.
        """
        if self._disk_failure is not None:
            raise self._disk_failure
        try:
            return self._advance()
        except StorageFull as error:
            self.disk.ran_out(error)
            return False

    def _advance(self) -> bool:
        self.heartbeats.timeout_seconds = self.manifest.heartbeat_timeout
        if liveness.scan(self.registry, self.presence):
            self.changed()
        was_full = bool(self.disk.reason)
        if not self.disk.is_there():
            return False
        if was_full:
            self._resumes()
        return self._go_on()

    def sent(self, identity: Identity, nbytes: int) -> None:
        """Progress of a download: a sign of life."""
        self.heartbeats.hear(identity.worker_id)
        self.counters.add("bytes_sent", nbytes)

    # The operator

    def control(self) -> ControlReply:
        """The command in force, and who knows of it."""
        live = sorted(self.registry.live())
        return ControlReply(
            command=self.operator.command,
            acknowledged=tuple(w for w in live if self.operator.acknowledged(w)),
            missing=tuple(w for w in live if not self.operator.acknowledged(w)),
            kicked=self.operator.kicked,
        )

    def order(self, action: Action) -> ControlReply:
        """Run, pause after this round, or stop after it and save."""
        if self.operator.command.action == "pause":
            # Before the order: no lease ends between the two.
            self._resumes()
        command = self.operator.order(action)
        log.info("operator", extra={"action": command.action, "number": command.number})
        self.changed()
        return self.control()

    def kick(self, worker_id: str) -> ControlReply:
        """Takes a worker out at once and keeps it out; rounds no longer wait for it."""
        with self.refusals():
            self.membership.kick(worker_id)
        return self.control()

    def allow(self, worker_id: str) -> ControlReply:
        """Lets a worker in again."""
        self.operator.allow(worker_id)
        log.info("operator allows a worker", extra={"worker": worker_id})
        return self.control()

    def is_stopping(self) -> bool:
        """Whether the operator has asked for the end."""
        return self.operator.command.action == "stop"

    def end_stop(self) -> None:
        """Everybody has stopped: saves, and ends the order so that the next start goes on."""
        self.save()
        self.operator.end()

    # People

    def work(self) -> Work:
        """The queues of units, and who has which rows."""
        return queues.work(
            self.ledger,
            self.parts,
            self.manifest.work,
            expired_leases=self.counters.counted["expired_leases"],
        )

    def members(self) -> list[str]:
        """Workers that are registered and heard from, in order."""
        return sorted(self.registry.live())

    def state_hash(self) -> str:
        """Hash of the durable state; a refused message leaves it as it was."""
        return self.ledger.state_hash()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` (from any thread) whenever a waiting worker may have something to do."""
        self.changed.listeners.append(listener)

    def refused(self, error: AtollError) -> None:
        """Counts a refusal; adapters call it for what they refuse before a message gets here."""
        self.counters.refused(error)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts what is refused inside; adapters use it for what they refuse themselves."""
        try:
            yield
        except AtollError as exc:
            self.refused(exc)
            if isinstance(exc, StorageFull):
                self.disk.ran_out(exc)
            if isinstance(exc, DiskFailed):
                self._disk_failure = exc
                self.changed()  # `advance` ends the process
            raise
