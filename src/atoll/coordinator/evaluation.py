"""Held-out loss: who evaluates which rows of which version, and the sums that come back."""

from collections.abc import Callable

from atoll.errors import ContributionError, WrongRound
from atoll.ledger.base import Ledger
from atoll.ledger.records import EvaluationRecord
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import EvaluationReport, EvaluationTask


class Evaluation:
    """Shares the held-out rows of a version between the workers of the round it begins."""

    def __init__(
        self, ledger: Ledger, *, manifest: Callable[[], Manifest], held_out_rows: int, block: int
    ) -> None:
        self._ledger = ledger
        self._manifest = manifest  # the one in force
        self._rows = held_out_rows
        self._block = block
        self._reported = {(e.version, e.worker_id) for e in ledger.evaluations()}
        # Who shares a version's rows is fixed when it is first asked: a round that is filled up
        # later must not cut the rows anew.
        self._sharing: tuple[int, list[str]] = (-1, [])

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

        `members` in worker_id order; each row of the held-out set falls to exactly one of those
        that are members when a version's first task is given.
        """
        every = self._manifest().evaluate.every
        if not (every > 0 and (final or version % every == 0)):
            return None
        if self._sharing[0] != version:
            self._sharing = (version, members)
        sharing = self._sharing[1]
        if worker_id not in sharing or (version, worker_id) in self._reported:
            return None
        index, count = sharing.index(worker_id), len(sharing)
        start, stop = index * self._rows // count, (index + 1) * self._rows // count
        return EvaluationTask(version=version, start=start, stop=stop) if start < stop else None

    def add(self, report: EvaluationReport) -> None:
        """Records a share; the first report of it stands."""
        worker_id = report.identity.worker_id
        self._ledger.add_evaluation(
            EvaluationRecord(report.version, worker_id, report.loss_sum, report.tokens)
        )
        self._reported.add((report.version, worker_id))
