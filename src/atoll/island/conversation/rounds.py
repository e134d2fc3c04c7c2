"""The training's half of the conversation: ask, fetch, train, hand in, until the run is over."""

import logging
import math

from atoll.errors import ContributionError, WrongRound
from atoll.island.conversation import hand_in
from atoll.island.conversation.fetch import fetch
from atoll.island.conversation.intents import Evaluate, Foresee, Partial, Steps, Train, send
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Adopted
from atoll.island.state.continuity import Continuity
from atoll.island.state.weights import IslandWeights
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    Done,
    EvaluationReport,
    EvaluationTask,
    Identity,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 20.0  # a long poll; well below any proxy's idle limit


def question(
    identity: Identity, version: int | None, digest: str | None, *, upcoming: int = 0
) -> AssignmentRequest:
    """What next, for an island that holds these weights and knows the rows of round `upcoming`?"""
    return AssignmentRequest(
        identity=identity,
        version=version,
        digest=digest,
        wait_seconds=WAIT_SECONDS,
        upcoming=upcoming,
    )


class Rounds:
    """One island's rounds. Every method is collective: all ranks go the same steps."""

    def __init__(self, session: Session, weights: IslandWeights, continuity: Continuity) -> None:
        self.session = session
        self.weights = weights
        self.continuity = continuity
        self.stale_rounds = 0
        self._upcoming = 0  # the newest planned round whose rows are known

    def take_part(self) -> Steps[None]:
        """From what an earlier life left to the end of the run; yields `Train` for each round."""
        yield from hand_in.resume(self.session, self.continuity)
        while (given := (yield from self._next())) is not None:
            trained = yield Train(given)
            header = hand_in.header_of(self.session, self.weights.layout, given, trained)
            accepted = yield from hand_in.hand_in(
                self.session, self.continuity, self.weights, header
            )
            self.stale_rounds += not accepted
        yield from self.session.leave()

    def ask(self) -> Steps[Assignment]:
        """What next? Says which published weights this island holds."""
        standing, weights = self.session.standing, self.weights
        reply = yield from send(
            question(standing.identity(), weights.version, weights.digest, upcoming=self._upcoming)
        )
        standing.told(reply.generation)
        return reply

    def _next(self) -> Steps[Assignment | None]:
        """The next rows to train, from the published weights; None when the run is over."""
        while True:
            reply = yield from self.session.call(self.ask)
            if reply.upcoming > self._upcoming:
                self._upcoming = reply.upcoming
                yield Foresee(reply.upcoming_ranges)
            if reply.action == "fetch":
                yield from fetch(self.session, self.weights)
                continue
            self.weights.reset()
            if reply.evaluation is not None:
                yield from self._evaluate(reply.evaluation)
            if reply.action == "stop":
                log.info(
                    "stopped",
                    extra={
                        "reason": reply.reason,
                        "version": reply.version,
                        "digest": reply.digest,
                    },
                )
                return None
            if reply.action == "train" and (yield from self._adopt(reply)):
                self.weights.train()
                return reply

    def _adopt(self, given: Assignment) -> Steps[bool]:
        """Takes over the manifest that the round is under; False when this island must ask again.

        The one place where settings change: between two rounds.
        """
        session = self.session
        unknown = given.manifest_sha256 not in (None, session.standing.info.manifest_sha256)
        # All ranks ask again when one must: the leader may have heard of it while it sent.
        if any(one for (one,) in session.group.gather([unknown])):
            yield from session.call(session.refresh)
            return False
        info = session.standing.info
        if info.manifest_sha256 == session.adopted.info.manifest_sha256:
            return True
        session.adopted = Adopted.of(info)
        self.weights.download = session.adopted.download
        self.continuity.adopt(info, session.adopted.upload)
        log.info(
            "settings adopted from the coordinator",
            extra={"manifest": session.adopted.manifest.body()},
        )
        return True

    def _evaluate(self, task: EvaluationTask) -> Steps[None]:
        """This island's share of the held-out loss: a partial sum with its honest count."""
        found: Partial | None = yield Evaluate(task)
        if found is None or not found.tokens or not math.isfinite(found.loss_sum):
            return

        def report() -> Steps[Done]:
            return send(
                EvaluationReport(
                    identity=self.session.standing.identity(),
                    version=task.version,
                    loss_sum=found.loss_sum,
                    tokens=found.tokens,
                )
            )

        try:
            yield from self.session.call(report)
        except (WrongRound, ContributionError) as error:
            # The coordinator went on, or restarted in between: a figure less, and no work lost.
            log.warning("evaluation refused", extra={"code": error.code, "reason": str(error)})
