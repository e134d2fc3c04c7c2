"""The training's half of the conversation: ask, fetch, train, hand in, until the run is over."""

import logging
import math
from dataclasses import asdict

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
    who: Identity, version: int | None, digest: str | None, *, upcoming: int = 0, awaits: int = 0
) -> AssignmentRequest:
    """The question what to do next, of an island with these weights and the rows of `upcoming`.

    With `awaits`: it must merge that round before it goes on.
    """
    return AssignmentRequest(
        identity=who,
        version=version,
        digest=digest,
        wait_seconds=WAIT_SECONDS,
        upcoming=upcoming,
        awaits=awaits,
    )


class Rounds:
    """One island's rounds, for its training thread. Every method is collective."""

    def __init__(self, session: Session, weights: IslandWeights, continuity: Continuity) -> None:
        self.session = session
        self.weights = weights
        self.continuity = continuity
        self.stale_rounds = 0
        self._began: int | None = None  # the round at which it set out from published weights
        self._trained = 0  # the last round that it trained
        self._upcoming = 0  # the newest planned round whose rows are known

    def take_part(self) -> Steps[None]:
        """From what an earlier life left to the end of the run; yields `Train` for each round."""
        yield from hand_in.resume(self.session, self.continuity)
        while (given := (yield from self._next())) is not None:
            self._begin(given)
            trained = yield Train(given)
            assert self._began is not None
            session, weights = self.session, self.weights
            header = hand_in.header_of(session, weights, given, trained, began=self._began)
            if not (yield from hand_in.hand_in(session, self.continuity, weights, header)):
                self.stale_rounds += 1
                # Else rows that did not count would be in the next contribution.
                self._set_out_anew()
        yield from self.session.leave()

    def _begin(self, given: Assignment) -> None:
        """Begins a round's training, from the published weights or on from earlier rounds."""
        assert given.round is not None
        if self._began is not None and given.round < self._trained:
            # Filled up late: what was trained since would be in none of the rounds counted.
            self._set_out_anew()
        self._began = given.round if self._began is None else self._began
        self._trained = given.round
        self.weights.train()

    def _set_out_anew(self) -> None:
        """Makes the local weights the published ones again."""
        self.weights.reset()
        self._began = None

    def merge(self, round_number: int) -> Steps[None]:
        """Waits until the round is published, and takes it into the local weights.

        Within a round: what is merged is trained on. Where only the whole weights could be had,
        nothing that was trained before is in the local ones any more, so they began in this round.
        """
        while self.weights.version is None or self.weights.version < round_number:
            reply = yield from self.session.call(lambda: self.ask(awaits=round_number))
            if reply.action == "stop":
                return
            if reply.action == "fetch":
                yield from self._fetch()
                self.weights.train()
                self._began = self._trained if self._began is None else self._began

    def _fetch(self) -> Steps[None]:
        yield from fetch(self.session, self.weights)
        if len(self.weights.newest) == self.weights.layout.size:
            self._began = None  # it sets out from the published weights

    def ask(self, *, awaits: int = 0) -> Steps[Assignment]:
        """What next? Says which published weights this island holds, and what it waits for."""
        standing, weights = self.session.standing, self.weights
        who, known = standing.identity(), self._upcoming
        asked = question(who, weights.version, weights.digest, upcoming=known, awaits=awaits)
        reply = yield from send(asked)
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
                yield from self._fetch()
                continue
            if reply.evaluation is not None:
                yield from self._evaluate(reply.evaluation)
            if reply.action == "stop":
                log.info("stopped", extra=reply.model_dump(include={"reason", "version", "digest"}))
                return None
            if reply.action == "train":
                yield from self._adopt(reply)
                return reply

    def _adopt(self, given: Assignment) -> Steps[None]:
        """Takes over the manifest that the round is under.

        The one place where settings change: between two rounds. It may be an older version than the
        one in force: rounds that were planned before a change keep theirs.
        """
        session, wanted = self.session, given.manifest_sha256
        if wanted in (None, session.adopted.info.manifest_sha256):
            return
        info = session.standing.info
        # All ranks look when one must: the leader may have heard of it while it sent.
        if any(one for (one,) in session.group.gather([wanted != info.manifest_sha256])):
            info = yield from session.call(lambda: session.version(wanted))
        session.adopted = Adopted.of(info)
        self.weights.download = session.adopted.download
        self.continuity.adopt(info)
        body = session.adopted.manifest.body()
        log.info("settings adopted from the coordinator", extra={"manifest": body})

    def _evaluate(self, task: EvaluationTask) -> Steps[None]:
        """This island's share of the held-out loss: a partial sum with its honest count."""
        with self.weights.published_shown():
            found: Partial | None = yield Evaluate(task)
        if found is None or not found.tokens or not math.isfinite(found.loss_sum):
            return

        def report() -> Steps[Done]:
            who = self.session.standing.identity()
            return send(EvaluationReport(identity=who, version=task.version, **asdict(found)))

        try:
            yield from self.session.call(report)
        except (WrongRound, ContributionError) as error:
            # The coordinator went on, or restarted in between: a figure less, and no work lost.
            log.warning("evaluation refused", extra={"code": error.code, "reason": str(error)})
