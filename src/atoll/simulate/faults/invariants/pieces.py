"""What an island is given that asks: of which round, and how many rows."""

from collections import Counter
from math import floor
from typing import Any

from atoll.protocol.messages import AssignmentRequest
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Seen, check


class Pieces:
    """Computes from settings, records and told speeds what was to be leased."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def issued(self, leases: list[Row], before: View, view: View) -> None:
        """These leases were issued in one transaction."""
        call = self._seen.call
        if call is not None and isinstance(call.message, AssignmentRequest):
            self._check_asked(call.message, {lease.round for lease in leases}, before)
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

    def _check_asked(self, asked: AssignmentRequest, found: set[int], before: View) -> None:
        open_rounds = before.open_rounds
        unpublished = [n for n, row in before.rounds.items() if row.state != "published"]
        worker_id, version = asked.identity.worker_id, asked.version or 0
        folding = [
            n for n in unpublished if worker_id in {row.worker_id for row in before.accepted(n)}
        ]
        strategy = before.terms(version + 1).asked
        right = strategy.asked(version, open_rounds, folding)
        is_so = version == before.version and found == {right}
        check("given-by-rule", is_so, asked=asked, given=found, right=right, folding=folding)

    def _steps(self, worker_id: str, live: set[str], settings: dict[str, Any]) -> int:
        steps: int = settings["sync_every"] // settings["num_fragments"]
        speeds = {name: v for name, v in self._seen.speeds.items() if name in live}
        if settings["dylu"] and worker_id in speeds:
            steps = max(1, floor(speeds[worker_id] / max(speeds.values()) * steps))
        return steps
