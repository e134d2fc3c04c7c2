"""An island's share of the held-out loss of a published version."""

import logging
import math
from dataclasses import asdict

from atoll.errors import ContributionError, WrongRound
from atoll.island.conversation.intents import Evaluate, Partial, Steps, decided, led, send
from atoll.island.conversation.session import Session
from atoll.island.conversation.transfers import Transfers
from atoll.island.state.weights import IslandWeights
from atoll.protocol.messages import Done, EvaluationReport, EvaluationTask

log = logging.getLogger(__name__)


class HeldOut:
    """Evaluates what assignments ask for, between two rounds. Collective; the training's."""

    def __init__(self, session: Session, weights: IslandWeights, transfers: Transfers) -> None:
        self._session = session
        self._weights = weights
        self._transfers = transfers
        self._newest = -1  # version that was evaluated

    def evaluate(self, task: EvaluationTask, *, waits: bool) -> Steps[None]:
        """Reports a partial sum of the held-out loss with its honest count.

        Unless it `waits`, the training waits for nothing that travels: while a version arrives none
        is evaluated, another will be asked for; and the report goes out beside it.
        """
        if task.version <= self._newest:
            return  # rounds that were asked for ahead ask for it again
        if waits:
            yield from led(self._transfers.rest)
        elif not (yield from decided(self._transfers.rests)):
            return
        try:
            found = yield from self._share_of(task)
        finally:
            self._transfers.go_on()
        if found is None or not found.tokens or not math.isfinite(found.loss_sum):
            return

        sending = reported(self._session, self._newest, found)
        if waits:
            yield from sending
        elif self._session.group.is_leader:
            self._transfers.say(sending)

    def _share_of(self, task: EvaluationTask) -> Steps[Partial | None]:
        """The partial sum of the published weights; None when they are of no version asked for."""
        weights = self._weights
        version, is_shown = yield from decided(lambda: [weights.held[0], weights.shows_published])
        if version is None or not task.is_answered_by(version):
            return None
        self._newest = version
        if is_shown:
            found: Partial | None = yield Evaluate(task)
            return found
        with weights.published_shown():
            found = yield Evaluate(task)
        return found


def reported(session: Session, version: int, found: Partial) -> Steps[None]:
    """Sends a share of a version's loss; one that is refused is a figure less, and no work lost."""

    def report() -> Steps[Done]:
        who = session.standing.identity()
        return send(EvaluationReport(identity=who, version=version, **asdict(found)))

    try:
        yield from session.call(report)
    except (WrongRound, ContributionError) as error:
        # The coordinator went on, or restarted in between.
        log.warning("evaluation refused", extra={"code": error.code, "reason": str(error)})
