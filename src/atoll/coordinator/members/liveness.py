"""Who is taken for dead: two detectors, one consequence.

A lost presence stream finds killed processes and resets within its grace period; heartbeats find
silent deaths, a host gone or a partition, within the timeout and one scan.
"""

import logging

from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry

log = logging.getLogger(__name__)


def scan(registry: Registry, presence: Presence) -> bool:
    """Evicts everybody who is overdue; whether there was any. For the thread that closes rounds."""
    lost = [
        (s.worker_id, s.incarnation, f"its presence stream ended {seconds:.1f} s ago")
        for s, seconds in presence.overdue()
    ]
    evicted = False
    for worker_id, incarnation, reason in [*lost, *_silent(registry)]:
        if registry.evict(worker_id, incarnation, reason=reason):
            presence.forget(worker_id, incarnation)
            log.warning("worker evicted", extra={"worker": worker_id, "reason": reason})
            evicted = True
    return evicted


def _silent(registry: Registry) -> list[tuple[str, int, str]]:
    # In this order: who registers in between is in neither, rather than not yet live.
    active, found = registry.active(), []
    live = registry.heartbeats.live(worker.worker_id for worker in active)
    for worker in active:
        if worker.worker_id not in live:
            seconds = registry.heartbeats.seconds_since(worker.worker_id)
            silence = "long" if seconds is None else f"{seconds:.1f} s"
            reason = f"nothing was heard of it for {silence}"
            found.append((worker.worker_id, worker.incarnation, reason))
    return found
