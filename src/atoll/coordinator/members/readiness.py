"""What is told about the membership: whether enough are in, and how each worker fares."""

from collections.abc import Mapping

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


class MemberTable:
    """Every worker that ever registered, as an operator sees it.

    Reads, from request threads; changes nothing.
    """

    def __init__(
        self,
        registry: Registry,
        heartbeats: Heartbeats,
        presence: Presence,
        *,
        heartbeat_interval: float,
    ) -> None:
        self._registry = registry
        self._heartbeats = heartbeats
        self._presence = presence
        self._late_seconds = LATE_INTERVALS * heartbeat_interval

    def workers(self, pings: Mapping[str, float]) -> Workers:
        """In worker_id order; `pings` in milliseconds, where they were measured."""
        generation = self._registry.generations.current
        return Workers(
            generation=generation.number,
            workers=tuple(
                self._entry(worker, generation, pings.get(worker.worker_id))
                for worker in self._registry.known()
            ),
        )

    def _entry(
        self, worker: WorkerRecord, generation: GenerationRecord, ping_ms: float | None
    ) -> WorkerEntry:
        name = worker.worker_id
        member = next((m for m in generation.members if m.worker_id == name), None)
        presence = self._presence.state(name)
        seconds = self._heartbeats.seconds_since(name)
        reason = self._registry.eviction(name)
        if member is None:
            state = "left" if reason is None else "evicted"
        else:
            overdue = seconds is None or seconds > self._late_seconds
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
                "hostname": self._registry.hostname(name),
                "ping_ms": ping_ms,
                "reason": reason or "",
            }
        )
