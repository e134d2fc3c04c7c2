"""How many rows a lease has: the steps of a round, or by the island's speed where it counts."""

from collections import Counter
from math import floor

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, check


class Pieces:
    """Computes from settings and told speeds what was to be leased."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def issued(self, leases: list[Row], view: View) -> None:
        """These leases were issued in one transaction."""
        given: Counter[tuple[int, str]] = Counter()
        for lease in leases:
            given[lease.round, lease.worker_id] += lease.stop - lease.start
        for (number, worker_id), rows in given.items():
            settings = view.terms(number).settings
            steps, speeds = settings["sync_every"], self._live_speeds(view, number)
            if settings["dylu"] and worker_id in speeds:
                steps = max(1, floor(speeds[worker_id] / max(speeds.values()) * steps))
            right = steps * settings["inner"]["batch"]
            told = {"worker": worker_id, "round": number, "rows": rows, "of": right}
            check("rows-by-speed", rows == right, **told, speeds=speeds)

    def _live_speeds(self, view: View, number: int) -> dict[str, float]:
        timeout = view.terms(number).manifest.heartbeat_timeout - ROUNDING_SECONDS
        return {
            worker_id: speed
            for worker_id, speed in self._seen.speeds.items()
            if view.workers[worker_id].active and self._seen.silence(worker_id) < timeout
        }
