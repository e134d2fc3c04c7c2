"""Who is taken for dead: two detectors, one consequence.

A lost presence stream finds killed processes and resets within its grace period; heartbeats find
silent deaths, a host gone or a partition, within the timeout and one scan.
"""

import logging
from dataclasses import dataclass

from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Liveness:
    """Evicts; belongs to the thread that closes rounds."""

    registry: Registry
    heartbeats: Heartbeats
    presence: Presence

    def scan(self) -> bool:
        """Evicts everybody who is overdue; whether there was any."""
        evicted = False
        for worker_id, incarnation, reason in [*self._absent(), *self._silent()]:
            if self.registry.evict(worker_id, incarnation, reason=reason):
                self.presence.forget(worker_id, incarnation)
                log.warning("worker evicted", extra={"worker": worker_id, "reason": reason})
                evicted = True
        return evicted

    def _absent(self) -> list[tuple[str, int, str]]:
        return [
            (s.worker_id, s.incarnation, f"its presence stream ended {seconds:.1f} s ago")
            for s, seconds in self.presence.overdue()
        ]

    def _silent(self) -> list[tuple[str, int, str]]:
        # In this order: who registers in between is in neither, rather than not yet live.
        active = self.registry.active()
        live = self.heartbeats.live(worker.worker_id for worker in active)
        return [
            (
                w.worker_id,
                w.incarnation,
                f"nothing was heard of it for {self._silence(w.worker_id)}",
            )
            for w in active
            if w.worker_id not in live
        ]

    def _silence(self, worker_id: str) -> str:
        seconds = self.heartbeats.seconds_since(worker_id)
        return "long" if seconds is None else f"{seconds:.1f} s"
