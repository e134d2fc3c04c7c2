"""What is told about the membership: whether enough are in, and how each worker fares."""

from dataclasses import KW_ONLY, dataclass

from atoll.coordinator.members.dialback import Dialback
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry
from atoll.ledger.records import GenerationRecord, WorkerRecord
from atoll.protocol.messages import Ready, ReadyMember, WorkerEntry, Workers

LATE_INTERVALS = 2  # heartbeats that may be missed before a worker is shown as late


def ready(generation: GenerationRecord, *, min_workers: int) -> Ready:
    """Whether the generation has so many members, and who they are."""
    return Ready(
        ready=len(generation.members) >= min_workers,
        active_workers=len(generation.members),
        min_workers=min_workers,
        generation=generation.number,
        workers=tuple(
            ReadyMember(worker_id=m.worker_id, ip_address=m.ip_address, port=m.port, rank=m.rank)
            for m in generation.members
        ),
    )


@dataclass(frozen=True)
class MemberTable:
    """Every worker that ever registered, as an operator sees it.

    Reads, from request threads; changes nothing.
    """

    registry: Registry
    heartbeats: Heartbeats
    presence: Presence
    dialback: Dialback
    _: KW_ONLY
    heartbeat_interval: float

    def workers(self) -> Workers:
        """In worker_id order."""
        generation, pings = self.registry.generations.current, self.dialback.pings_ms()
        return Workers(
            generation=generation.number,
            workers=tuple(
                self._entry(worker, generation, pings.get(worker.worker_id))
                for worker in self.registry.known()
            ),
        )

    def _entry(
        self, worker: WorkerRecord, generation: GenerationRecord, ping_ms: float | None
    ) -> WorkerEntry:
        name = worker.worker_id
        member = next((m for m in generation.members if m.worker_id == name), None)
        presence = self.presence.state(name)
        seconds = self.heartbeats.seconds_since(name)
        reason = self.registry.eviction(name)
        if member is None:
            state = "left" if reason is None else "evicted"
        else:
            overdue = seconds is None or seconds > LATE_INTERVALS * self.heartbeat_interval
            state = "late" if overdue or presence == "lost" else "live"
        return WorkerEntry.model_validate(
            {
                "worker_id": name,
                "incarnation": worker.incarnation,
                "state": state,
                "presence": presence,
                "seconds_since_heard": seconds,
                "rank": None if member is None else member.rank,
                "ip_address": "" if member is None else member.ip_address,
                "port": 0 if member is None else member.port,
                "hostname": self.registry.hostname(name),
                "ping_ms": ping_ms,
                "reason": reason or "",
            }
        )
