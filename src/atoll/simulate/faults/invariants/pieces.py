"""How many rows a lease has: the steps of a round, or by the island's speed where it counts."""

from collections import Counter
from math import floor
from typing import Any

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Seen, check


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
            right = {
                self._steps(worker_id, live, settings) * settings["inner"]["batch"]
                for live in self._seen.live(view, number)
            }
            told = {"worker": worker_id, "round": number, "rows": rows, "of": right}
            check("rows-by-speed", rows in right, **told, speeds=self._seen.speeds)

    def _steps(self, worker_id: str, live: set[str], settings: dict[str, Any]) -> int:
        steps: int = settings["sync_every"]
        speeds = {name: v for name, v in self._seen.speeds.items() if name in live}
        if settings["dylu"] and worker_id in speeds:
            steps = max(1, floor(speeds[worker_id] / max(speeds.values()) * steps))
        return steps
