"""Held-out loss: who evaluates which rows of which version, and the sums that come back."""

from atoll.errors import ContributionError, WrongRound
from atoll.ledger.base import Ledger
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import EvaluationReport, EvaluationTask


class Evaluation:
    """Shares the held-out rows of a version between the workers of the round it begins."""

    def __init__(self, ledger: Ledger, *, manifest: Manifest, held_out_rows: int) -> None:
        self._ledger = ledger
        self._every = manifest.evaluate.every
        self._rows = held_out_rows
        self._block = int(manifest.data.identity["block"])

    def check(self, report: EvaluationReport, *, current_version: int) -> None:
        """Refuses a report of weights that nobody has yet, or over more tokens than there are."""
        if report.version > current_version:
            raise WrongRound(
                f"version={report.version} of the evaluation is not published; the newest is "
                f"{current_version}; evaluate what an assignment asks for"
            )
        if report.tokens > self._rows * self._block:
            raise ContributionError(
                f"tokens={report.tokens} of the evaluation are more than the "
                f"{self._rows * self._block} of {self._rows} held-out rows"
            )

    def task(
        self, worker_id: str, *, version: int, members: list[str], final: bool
    ) -> EvaluationTask | None:
        """The rows `worker_id` evaluates at `version`; None when there is nothing to do.

        `members` in worker_id order; each row of the held-out set falls to exactly one of them.
        """
        wanted = self._every > 0 and (final or version % self._every == 0)
        if not wanted or worker_id not in members or self.is_reported(version, worker_id):
            return None
        index, count = members.index(worker_id), len(members)
        start, stop = index * self._rows // count, (index + 1) * self._rows // count
        return EvaluationTask(version=version, start=start, stop=stop) if start < stop else None

    def is_reported(self, version: int, worker_id: str) -> bool:
        """Whether this worker's share of `version` is in."""
        return any(
            e.version == version and e.worker_id == worker_id for e in self._ledger.evaluations()
        )
