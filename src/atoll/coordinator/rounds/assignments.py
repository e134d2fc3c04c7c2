"""What a worker does next: train, wait, fetch or stop, and which share of an evaluation.

Answers from what rounds, versions and the operator's command are now; changes none of them. Who
may ask is checked before a question gets here.
"""

import logging

from atoll.coordinator.counters import Counters
from atoll.coordinator.members.control import Control
from atoll.coordinator.rounds.evaluation import Evaluation
from atoll.coordinator.rounds.rounds import LatestRound, Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.ledger.records import RoundState
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    EvaluationTask,
)
from atoll.rows import RowRange

log = logging.getLogger(__name__)


def _ranges(latest: LatestRound, worker_id: str) -> tuple[RowRange, ...]:
    return tuple(lease.row_range for lease in latest.ranges(worker_id))


class Assignments:
    """The answer to each worker's question, and which round each was last given. Thread-safe."""

    def __init__(
        self,
        rounds: Rounds,
        weights: RunWeights,
        control: Control,
        evaluation: Evaluation,
        counters: Counters,
    ) -> None:
        self._rounds = rounds
        self._weights = weights
        self._control = control
        self._evaluation = evaluation
        self._counters = counters
        self.begun: dict[str, int] = {}  # the round that each worker was last given, to show

    def forget(self, worker_id: str) -> None:
        """A new life of a worker begins, which was given nothing yet."""
        self.begun.pop(worker_id, None)

    def answer(self, request: AssignmentRequest) -> Assignment:
        """What the worker does next, without the generation; `wait` when nothing is to be done."""
        current = self._weights.current
        digest = current.digests.published.root
        if request.version != current.version or request.digest != digest:
            if request.version == current.version and request.digest is not None:
                self._counters.add("resyncs")
                log.warning(
                    "worker holds other weights, sent to fetch",
                    extra={"worker": request.identity.worker_id, "digest": request.digest},
                )
            return Assignment(action="fetch", version=current.version, digest=digest)
        reply = self._next(request.identity.worker_id, current.version, digest)
        if self._weights.current is not current:
            # A round was published meanwhile: the answer may belong to the version after it.
            return Assignment(action="fetch", version=current.version, digest=digest)
        return reply

    def take_evaluation(self, report: EvaluationReport) -> None:
        """Takes the share of a version's held-out loss that the worker was asked for."""
        worker_id, version = report.identity.worker_id, self._weights.current.version
        asked = self._evaluation.has_asked(worker_id, version=report.version)
        if report.version == version and not asked:
            # An earlier life of the coordinator asked: the same share, unless others came.
            self._evaluation_task(worker_id, version)
        self._evaluation.check(report)
        self._evaluation.add(report)

    def _next(self, worker_id: str, version: int, digest: str) -> Assignment:
        latest = self._rounds.latest
        finished = self._rounds.is_finished()
        task = self._evaluation_task(worker_id, version)
        if finished:
            return Assignment(
                action="stop",
                version=version,
                digest=digest,
                evaluation=task,
                reason="the run is finished",
            )
        wanted = self._control.command.action
        if wanted == "stop":
            reason = "the operator stops the run"
            return Assignment(action="stop", version=version, digest=digest, reason=reason)
        if latest is None or latest.record.state is not RoundState.OPEN:
            return self._planned(latest, worker_id).model_copy(
                update={"version": version, "digest": digest}
            )
        if worker_id not in latest.holding or worker_id in latest.contributions:
            return Assignment(action="wait", version=version, digest=digest)
        if wanted == "pause":
            reason = "the operator has paused the run"
            return Assignment(action="wait", version=version, digest=digest, reason=reason)
        self.begun[worker_id] = latest.record.round
        return self._train(latest, worker_id).model_copy(
            update={"version": version, "digest": digest, "evaluation": task}
        )

    def _planned(self, latest: LatestRound | None, worker_id: str) -> Assignment:
        """`wait`, with the rows of the next round where there are some."""
        reply = Assignment(action="wait", version=0, digest="0" * 64)
        if latest is None or latest.record.state is not RoundState.PLANNED:
            return reply
        ranges = _ranges(latest, worker_id)
        known = {"upcoming": latest.record.round, "upcoming_ranges": ranges}
        return reply.model_copy(update=known) if ranges else reply

    def _train(self, latest: LatestRound, worker_id: str) -> Assignment:
        return Assignment(
            action="train",
            version=0,
            digest="0" * 64,
            round=latest.record.round,
            manifest_sha256=latest.record.manifest_sha256,
            ranges=_ranges(latest, worker_id),
            global_tokens=self._rounds.tokens,
            num_planned=len(latest.holding),
        )

    def _evaluation_task(self, worker_id: str, version: int) -> EvaluationTask | None:
        latest = self._rounds.latest
        if latest is None:
            return None
        return self._evaluation.task(
            worker_id,
            version=version,
            members=sorted(latest.planned),
            final=self._rounds.is_finished(),
        )
