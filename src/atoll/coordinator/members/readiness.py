"""What is told about the membership: whether enough are in, and how each worker fares."""

from typing import Literal

from atoll.coordinator.members.dialback import Dialback
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


def workers(
    registry: Registry, presence: Presence, dialback: Dialback, *, heartbeat_interval: float
) -> Workers:
    """Every worker that ever registered, in worker_id order, as an operator sees it."""
    generation, pings = registry.generation, dialback.pings_ms()
    members = {member.worker_id: member for member in generation.members}

    def entry(worker: WorkerRecord) -> WorkerEntry:
        name, member = worker.worker_id, members.get(worker.worker_id)
        seconds, reason = registry.heartbeats.seconds_since(name), registry.eviction(name)
        stream = presence.state(name)
        state: Literal["live", "late", "evicted", "left"]
        if member is None:
            state = "left" if reason is None else "evicted"
        else:
            overdue = seconds is None or seconds > LATE_INTERVALS * heartbeat_interval
            state = "late" if overdue or stream == "lost" else "live"
        return WorkerEntry(
            worker_id=name,
            incarnation=worker.incarnation,
            state=state,
            presence=stream,
            seconds_since_heard=seconds,
            rank=None if member is None else member.rank,
            ip_address="" if member is None else member.ip_address,
            port=0 if member is None else member.port,
            hostname=registry.hostname(name),
            ping_ms=pings.get(name),
            reason=reason or "",
        )

    return Workers(generation=generation.number, workers=tuple(map(entry, registry.known())))
