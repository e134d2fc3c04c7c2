"""How workers come, stay and go: registering, signs of life, presence streams, kicks.

Owns the order in which registry, heartbeats, presence and control hear of it. Who is dead is
decided by liveness, which rounds wait for whom by rounds.
"""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from atoll.clock import Clock
from atoll.coordinator.members import agreement, publishers
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.dialback import Dialback
from atoll.coordinator.members.presence import Presence, Stream
from atoll.coordinator.members.workers import Registry
from atoll.errors import AtollError
from atoll.layout import Layout
from atoll.ledger.records import GenerationRecord, WorkerRecord
from atoll.protocol.messages import HeartbeatReply, HeartbeatRequest, Identity, RegisterRequest
from atoll.versions.manifests import Manifests, Recorded

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """What a worker's standing in the run becomes by a message. Thread-safe."""

    registry: Registry
    presence: Presence
    control: Control
    dialback: Dialback
    _: KW_ONLY
    clock: Clock
    manifests: Manifests
    layout: Layout
    changed: Callable[[], None]

    def enter(self, identity: Identity) -> GenerationRecord:
        """Who speaks, in which life and generation; refused before anything else is looked at.

        A message belongs to the generation in which it began: what takes long is not asked again.
        """
        self.registry.check(identity)
        return self.registry.check_generation(identity.generation)

    def register(self, request: RegisterRequest, in_force: Recorded, *, peer: str) -> WorkerRecord:
        """Takes a worker in, if it agrees with the manifest in force; a new generation."""
        self.control.check(request.worker_id)
        agreement.check(request, in_force, self.manifests, layout=self.layout)
        if in_force.any_strategy.dials:
            self.dialback.check(request.worker_id, request.ip_address or peer, request.port)
        publisher = publishers.stated(request, in_force)

        def check() -> None:
            self.control.check(request.worker_id)
            if publisher is not None:
                publishers.check(publisher, self.registry.publishers)

        record = self.registry.register(request, peer=peer, check=check, publisher=publisher)
        # A stream of an earlier life says nothing about this one.
        self.presence.forget(request.worker_id, record.incarnation - 1)
        return record

    def deregister(self, identity: Identity) -> None:
        """Lets a worker go; the round no longer waits for it."""
        self.enter(identity)
        self.registry.deregister(identity)
        self.presence.forget(identity.worker_id, identity.incarnation)
        log.info("worker left", extra={"worker": identity.worker_id})
        self.changed()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A sign of life, what the worker tells about itself, and which command it knows."""
        generation = self.enter(request.identity)
        self.registry.heartbeats.hear(request.identity.worker_id, request.telemetry)
        self.control.acknowledge(request.identity.worker_id, request.acknowledged)
        return HeartbeatReply(generation=generation.number, command=self.control.command)

    def attend(self, identity: Identity, *, close: Callable[[], None]) -> Stream:
        """A presence stream begins; `close` ends it from this side, from any thread."""
        self.enter(identity)
        self.registry.heartbeats.hear(identity.worker_id)
        stream = self.presence.open(identity.worker_id, identity.incarnation, close)
        try:
            # That life may have ended in between; its stream would hide the end of the next.
            self.registry.check(identity)
        except AtollError:
            self.presence.forget(identity.worker_id, identity.incarnation)
            raise
        return stream

    def absent(self, stream: Stream) -> None:
        """A presence stream ended; harmless when repeated."""
        if self.presence.lose(stream):
            log.info("presence lost", extra={"worker": stream.worker_id})
            self.changed()

    def kick(self, worker_id: str) -> None:
        """Takes a worker out at once and keeps it out."""
        self.registry.must_know(worker_id)
        # Kept out first: it must not slip in again in between.
        self.control.kick(worker_id, wall=self.clock.wall())
        incarnation = self.registry.remove(worker_id)
        self.presence.forget(worker_id, incarnation)
        log.info("operator took a worker out", extra={"worker": worker_id})
        self.changed()

    def finish_kicks(self) -> None:
        """Ends the kicks that an earlier life of the coordinator left half done.

        A kick first keeps the worker out and then removes it; this removes who is still registered.
        """
        for worker in self.registry.active():
            if worker.worker_id in self.control.kicked:
                self.registry.remove(worker.worker_id)
