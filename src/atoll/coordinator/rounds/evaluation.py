"""Held-out loss: who evaluates which rows of which version, and the sums that come back."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import ContributionError, WrongRound
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import EvaluationRecord
from atoll.protocol import losses
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import EvaluationReport, EvaluationTask


@dataclass(eq=False)
class Evaluation:
    """Shares the held-out rows of a version between the workers of the round it begins.

    Request threads ask and report at the same time. Thread-safe: the lock is over what is in
    memory, never over a transaction.
    """

    ledger: Ledger
    manifest: Callable[[], Manifest]  # the one in force

    def __post_init__(self) -> None:
        identity = self.manifest().data.identity  # the same in every version
        self._rows, self._block = int(identity["held_out_rows"]), int(identity["block"])
        self._lock = threading.Lock()
        with self.ledger.reading() as t:
            self._reported = {(e.version, e.worker_id) for e in t.evaluations.all()}
        self._newest = max((version for version, _ in self._reported), default=-1)  # reported
        # Who shares a version's rows is fixed when it is first asked: a round that is filled up
        # later must not cut the rows anew.
        self._sharing: tuple[int, list[str]] = (-1, [])
        self._asked: dict[str, EvaluationTask] = {}  # the newest of each worker

    def take(self, report: EvaluationReport) -> None:
        """Records the share that was last asked of that worker; the first report of it stands.

        WrongRound for a version that was not asked for, ContributionError for more tokens than its
        rows hold or a loss that no model has. What was recorded before may be sent again.
        """
        worker_id = report.identity.worker_id
        with self._lock:
            is_known = (report.version, worker_id) in self._reported
            asked = self._asked.get(worker_id)
        if not is_known:
            self._check(report, asked)
        found = EvaluationRecord(report.version, worker_id, report.loss_sum, report.tokens)
        with self.ledger.writing() as t:
            t.evaluations.add(found)
        with self._lock:
            self._reported.add((report.version, worker_id))
            self._newest = max(report.version, self._newest)

    def _check(self, report: EvaluationReport, asked: EvaluationTask | None) -> None:
        if asked is None or not asked.is_answered_by(report.version):
            newest = "nothing" if asked is None else f"version {asked.version}"
            raise WrongRound(
                f"version={report.version} of the evaluation was not asked of "
                f"worker_id={report.identity.worker_id!r}, which was last asked for {newest}; "
                f"evaluate what an assignment asks for"
            )
        tokens = (asked.stop - asked.start) * self._block
        if report.tokens > tokens:
            raise ContributionError(
                f"tokens={report.tokens} of the evaluation are more than the {tokens} of the "
                f"held-out rows [{asked.start}, {asked.stop}) that were asked for"
            )
        losses.check(report.loss_sum, report.tokens, of="the evaluation")

    def task(
        self, worker_id: str, *, version: int, members: list[str], final: bool
    ) -> EvaluationTask | None:
        """The rows `worker_id` evaluates at `version`; None when there is nothing to do.

        `members` in worker_id order; each row of the held-out set falls to exactly one of those
        that are members when a version's first task is given. None also for a version older than
        one that was asked for: a request that was overtaken must not cut the newer one's rows anew.
        """
        with self._lock:
            if not (final or self._is_due(version)):
                return None
            if version > self._sharing[0]:
                self._sharing = (version, members)
            newest, sharing = self._sharing
            is_known = (version, worker_id) in self._reported
            if version < newest or worker_id not in sharing or is_known:
                return None
            index, count = sharing.index(worker_id), len(sharing)
            start, stop = index * self._rows // count, (index + 1) * self._rows // count
            if start == stop:
                return None
            self._asked[worker_id] = EvaluationTask(
                version=version, start=start, stop=stop, may_be_later=count == 1
            )
            return self._asked[worker_id]

    def _is_due(self, version: int) -> bool:
        """Whether it is every so many versions' turn, or that of one before it was passed over.

        Where training does not wait for versions, nobody may ask while it holds just that one.
        """
        every = self.manifest().evaluate.every
        return every > 0 and (version % every == 0 or version // every > self._newest // every)
