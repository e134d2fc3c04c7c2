"""What a worker does next: train, wait, fetch or stop, and which share of an evaluation.

Answers from what rounds, versions and the operator's command are now. Where the strategy gives rows
to whoever asks, it has them given. Who may ask is checked before a question gets here.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.coordinator.counters import Counters
from atoll.coordinator.members.control import Control
from atoll.coordinator.rounds.evaluation import Evaluation
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import Current, RunWeights
from atoll.coordinator.rounds.under_way import UnderWay
from atoll.errors import WrongRound
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    EvaluationTask,
)
from atoll.rows import RowRange

log = logging.getLogger(__name__)

STOPPED = "the operator stops the run"

Action = Literal["train", "wait", "fetch", "stop"]


def _ranges(found: UnderWay, worker_id: str) -> tuple[RowRange, ...]:
    return tuple(lease.row_range for lease in found.ranges(worker_id))


def _fetch(current: Current) -> Assignment:
    return Assignment(
        action="fetch", version=current.version, digest=current.digests.published.root
    )


def _told(action: Action, **fields: Any) -> Assignment:
    """An answer; the version and digest that the worker holds are filled in by the caller."""
    return Assignment(action=action, version=0, digest="0" * 64, **fields)


@dataclass(frozen=True)
class Assignments:
    """The answer to each worker's question, and which round each was last given. Thread-safe."""

    rounds: Rounds
    weights: RunWeights
    control: Control
    evaluation: Evaluation
    counters: Counters
    # The round that each worker was last given, to show.
    begun: dict[str, int] = field(default_factory=dict, init=False)

    def forget(self, worker_id: str) -> None:
        """Forgets which round an earlier life of the worker was given."""
        self.begun.pop(worker_id, None)

    def answer(self, request: AssignmentRequest) -> Assignment:
        """What the worker does next, without the generation; `wait` when nothing is to be done."""
        while True:
            current = self.weights.current
            reply = self._answer(request, current)
            # Else a round was published meanwhile: the answer may mix two versions.
            if self.weights.current is current:
                return reply

    def _answer(self, request: AssignmentRequest, current: Current) -> Assignment:
        if request.version is None or not self.weights.has_been(request.version, request.digest):
            if request.version == current.version and request.digest is not None:
                self.counters.add("resyncs")
                log.warning(
                    "worker holds other weights, sent to fetch",
                    extra={"worker": request.identity.worker_id, "digest": request.digest},
                )
            return _fetch(current)
        if request.awaits:
            told = self._awaited(request, request.version, current)
        else:
            told = self._next(request, request.version, current)
        if told.action == "fetch":
            return told
        return told.model_copy(update={"version": request.version, "digest": request.digest})

    def _awaited(self, request: AssignmentRequest, version: int, current: Current) -> Assignment:
        """The answer to a worker that must merge a later version before it goes on."""
        if request.awaits <= current.version:
            return _fetch(current)
        if self.control.command.action == "stop":
            # Who hands in what this version lacks may have stopped: it would wait for ever.
            return _told("stop", reason=STOPPED)
        needed = self.rounds.next_of(request.identity.worker_id, under_way=request.under_way)
        if needed is not None and needed.number <= request.awaits:
            # It was given rows of a round that must close before: else it waits for itself.
            return self._next(request, version, current)
        return _told("wait")

    def take_evaluation(self, report: EvaluationReport) -> None:
        """Takes the share of a version's held-out loss that the worker was asked for."""
        worker_id, version = report.identity.worker_id, self.weights.current.version
        if report.version > version:
            raise WrongRound(
                f"version={report.version} of the evaluation is not published, the newest is "
                f"{version}; evaluate what an assignment asks for"
            )
        if report.version == version:
            # An earlier life of the coordinator may have asked: the same share, unless others came.
            self._evaluation_task(worker_id, version)
        self.evaluation.take(report)

    def _next(self, request: AssignmentRequest, version: int, current: Current) -> Assignment:
        """The answer to a worker that holds `version`, which was or is the published one."""
        worker_id = request.identity.worker_id
        finished = self.rounds.is_finished()
        is_current = version == current.version
        if finished and is_current:
            task = self._evaluation_task(worker_id, version)
            return _told("stop", evaluation=task, reason="the run is finished")
        wanted = self.control.command.action
        if wanted == "stop":
            return _told("stop", reason=STOPPED)
        found = self.rounds.next_of(worker_id, under_way=request.under_way)
        if found is None and is_current and wanted == "run":
            found = self.rounds.give(worker_id, version=version)
        if found is None or version < self.rounds.needed(found.number):
            # Who holds the newest version and needs a later one waits until that is published.
            return self._planned(worker_id) if is_current else _fetch(current)
        if wanted == "pause":
            return _told("wait", reason="the operator has paused the run")
        self.begun[worker_id] = found.number
        ranges, settings = _ranges(found, worker_id), self.rounds.manifests.of_round(found.number)
        return _told(
            "train",
            round=found.number,
            manifest_sha256=found.record.manifest_sha256,
            fragment=found.record.fragment,
            ranges=ranges,
            steps=-(-sum(map(len, ranges)) // settings.manifest.inner.batch),
            global_tokens=found.record.tokens,
            num_planned=settings.round_strategy.abreast(len(found.holding)),
            evaluation=self._evaluation_task(worker_id, version),
        )

    def _planned(self, worker_id: str) -> Assignment:
        """`wait`, with the rows of a round that opens later where there are some."""
        for planned in self.rounds.under_way:
            ranges = _ranges(planned, worker_id)
            if planned.is_planned and ranges:
                return _told("wait", upcoming=planned.number, upcoming_ranges=ranges)
        return _told("wait")

    def _evaluation_task(self, worker_id: str, version: int) -> EvaluationTask | None:
        final, planned = self.rounds.is_finished(), self.rounds.members
        live = self.rounds.registry.live() if final else frozenset[str]()
        asked = self.rounds.run_strategy
        members = asked.evaluators(worker_id, planned, live, is_last=final)
        if not members:
            return None  # the first who ask would share the rows among none
        shares = list(members)
        return self.evaluation.task(worker_id, version=version, members=shares, final=final)
