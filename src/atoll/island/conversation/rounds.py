"""The training's half of the conversation: ask, train, merge, hand in, until the run is over."""

import logging
from contextlib import nullcontext
from functools import partial
from typing import Any

from atoll.island.conversation import hand_in
from atoll.island.conversation.asking import ask
from atoll.island.conversation.held_out import HeldOut
from atoll.island.conversation.intents import (
    Foresee,
    Steps,
    Train,
    Trained,
    decided,
    led,
)
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Adopted
from atoll.island.conversation.transfers import Transfers
from atoll.island.link.base import Work
from atoll.island.state.base import Saved
from atoll.island.state.continuity import Continuity
from atoll.island.state.weights import IslandWeights
from atoll.protocol.messages import Assignment
from atoll.strategies.base import ALL

log = logging.getLogger(__name__)


class Rounds:
    """One island's rounds, for its training thread. Every method is collective.

    What travels is the leader's `transfers`, beside the training. What they have come to, all ranks
    learn from the leader where it is looked at: at a merge and at the end of a round.
    """

    def __init__(self, session: Session, weights: IslandWeights, continuity: Continuity) -> None:
        self.session = session
        self.weights = weights
        self.continuity = continuity
        self.transfers = Transfers(session, weights, continuity)
        self._held_out = HeldOut(session, weights, self.transfers)
        self.stale_rounds = 0
        self._began: int | None = None  # the round at which it set out from published weights
        self._trained = 0  # the last round that it trained
        self._newest = 0  # the newest that it handed in
        self._tokens: dict[int, int] = {}  # of the rounds that it trained since it set out
        self._upcoming = 0  # the newest planned round whose rows are known

    def take_part(self) -> Steps[None]:
        """From what an earlier life left to the end of the run; yields `Train` for each round."""
        yield from self._resume()
        while (given := (yield from self._next())) is not None:
            self._begin(given)
            trained: Trained | None = yield Train(given)
            if trained is None or not (yield from self._is_whole(given)):
                yield from self._give_up()
                continue
            self._hand_in(given, trained)
            yield from self._settle(most=self.session.adopted.asked.in_flight)
        yield from self._settle(most=0)
        self.transfers.close()
        yield from self.session.leave()

    # Where the training stands

    def _place(self, given: Assignment) -> Steps[None]:
        """Makes the local weights what the round is trained from: the published ones, or its own.

        Its own go on where they hold all that the round's contribution will count: not where what
        was trained last is newer, or was missed.
        """
        number, strategy = given.round, self.session.adopted.asked
        assert number is not None
        self.weights.told(number, given.fragment)
        is_late = number < self._newest or self._trained < self._newest  # it was filled up late
        is_missed = strategy.keeps_local and number != self._trained + 1
        if self._began is None or is_late or is_missed:
            yield from self._set_out(number)
        else:
            self._merge_all(strategy.needs(number))

    def _begin(self, given: Assignment) -> None:
        """Begins a round's training."""
        assert given.round is not None
        self._trained = given.round
        self.weights.train()
        if self.session.adopted.asked.in_flight:
            self.transfers.look_ahead(given.round)  # the next may be open before this is handed in

    def _set_out(self, number: int) -> Steps[None]:
        """Makes the local weights the published ones: the round is trained from there."""
        yield from led(self.transfers.rest)
        yield from self._hold()
        self.weights.reset()
        self.transfers.go_on()
        self._began, self._tokens = number, {}

    def _hold(self) -> Steps[None]:
        """Followers learn which version the leader holds."""
        version, digest = yield from decided(lambda: self.weights.held)
        self.weights.adopt(version, digest)

    def merge(self, round_number: int) -> Steps[bool]:
        """Takes rounds up to this one into the local weights, once they are published.

        False when what was handed in does not count, so that what is being trained does not either.
        """

        def wait() -> Steps[bool]:
            self.transfers.want(round_number)
            return (yield from self.transfers.arrived(round_number)) and self.weights.can_merge()

        if round_number <= self.weights.merged:
            return True
        if not (yield from led(wait)):
            self._began = None
            return False
        yield from self._hold()
        self._merge_all(round_number)
        self.weights.train()  # steps follow, or have come before: they are not the published ones
        return True

    def _merge_all(self, last: int) -> None:
        """Merges rounds up to `last`, which are here, one by one."""
        for number in range(self.weights.merged + 1, last + 1):
            self.weights.merge(number)

    def _is_whole(self, given: Assignment) -> Steps[bool]:
        """Merges what is in flight where the round is to carry the whole model; whether it may."""
        assert given.round is not None
        return given.fragment != ALL or (yield from self.merge(given.round - 1))

    # Handing in

    def _hand_in(self, given: Assignment, trained: Trained) -> None:
        """Hands the round over to be sent; training may go on beside it."""
        assert given.round is not None and self._began is not None
        number, began = given.round, self._began
        self._newest = max(number, self._newest)
        self._tokens[number] = trained.tokens
        first = self.session.adopted.asked.first(number, began)
        self._tokens = {n: tokens for n, tokens in self._tokens.items() if n >= first}
        if given.fragment == ALL:
            self._began = None  # if the run goes on, it does from the published weights
        course = self._course()
        self.weights.gather()
        self._followers(lambda: self.continuity.save_part(number, course))
        # Else all wait for its answer. How many are under way by now says nothing: a receipt that
        # is late lets the training go on as well, before this one has been encoded.
        goes_on = self.session.adopted.asked.in_flight > 0
        if self.session.group.is_leader:
            tokens = sum(self._tokens.values())
            header = hand_in.header_of(
                self.session, self.weights, given, trained, began=began, tokens=tokens
            )
            self.transfers.send(
                hand_in.prepare(
                    *(self.session, self.continuity, self.weights, header),
                    copies=goes_on,
                    course=course,
                )
            )
        if goes_on:
            self.transfers.want(number)

    def _course(self) -> dict[str, Any]:
        tokens = [list(entry) for entry in self._tokens.items()]
        known = {"began": self._began, "trained": self._trained, "newest": self._newest}
        return {**known, "merged": self.weights.merged, "tokens": tokens}

    def _give_up(self) -> Steps[None]:
        """Forgets what was trained of a round: the inner state is that of the newest hand-in."""
        if not (yield from self._settle(most=0)):
            self.session.group.together(self.continuity.roll_back)
        self._began = None

    def _settle(self, *, most: int) -> Steps[bool]:
        """Waits until no more than `most` hand-ins are under way, and does as they came out.

        Whether one was refused, so that all is back at the last one that was accepted.
        """

        def wait() -> Steps[tuple[tuple[int, ...], bool]]:
            found = yield from self.transfers.settle(most=most)
            return found.accepted, found.is_refused

        accepted, is_refused = yield from led(wait)
        for number in accepted:
            self._followers(partial(self.continuity.promote, number))
        if is_refused:
            self.stale_rounds += 1
            self.session.group.together(self.continuity.roll_back)
            self.transfers.forgive()
            # Else rows that did not count would be in the next contribution.
            self._began, self._trained, self._newest = None, 0, 0
        return is_refused

    def _followers(self, work: Work) -> None:
        """Each rank but the leader does `work`."""
        group = self.session.group
        group.together(_nothing if group.is_leader else work)

    def _resume(self) -> Steps[None]:
        """Continues what an earlier life left, on all ranks or on none."""
        session, continuity, group = self.session, self.continuity, self.session.group
        waiting: list[Saved] = []

        def read() -> tuple[int | None, tuple[int, ...]]:
            version, lead = session.standing.version, session.adopted.asked.lead
            waiting.extend(continuity.resume(version=version, lead=lead))
            return continuity.rounds()

        checkpoint, pending = yield from decided(read)
        fits = group.together(lambda: group.is_leader or continuity.fall_in(checkpoint, pending))
        if not all(one for (one,) in group.gather([fits])):
            log.warning("the ranks' states are not of one round and are dropped")
            group.together(continuity.drop)
            return
        for saved in waiting:
            self.transfers.send(saved)
        local, course = continuity.take_local(), continuity.course
        if (yield from decided(lambda: local is not None)):
            self.weights.go_on_from(local, merged=course["merged"])
            self._began, self._trained = course["began"], course["trained"]
            self._newest = course["newest"]
            self._tokens = dict(course["tokens"])
        yield from self._settle(most=session.adopted.asked.in_flight)

    # What comes next

    def _next(self) -> Steps[Assignment | None]:
        """The next rows to train; None when the run is over."""
        ahead = yield from decided(self._taken_ahead)
        if ahead is not None:
            given = Assignment.model_validate_json(ahead)
            yield from self._prepare(given)
            return given
        while True:
            self.transfers.answer()
            reply = yield from self.session.call(self.ask)
            if reply.upcoming > self._upcoming:
                self._upcoming = reply.upcoming
                yield Foresee(reply.upcoming_ranges)
            if reply.action == "fetch":
                yield from self._fetch(reply.version)
                continue
            if reply.action == "stop":
                yield from self._stop(reply)
                return None
            yield from self._prepare(reply)
            if reply.action == "train":
                return reply

    def ask(self) -> Steps[Assignment]:
        """What next? Says which published weights this island holds."""
        busy = self.transfers.under_way
        return ask(self.session, self.weights, upcoming=self._upcoming, under_way=busy)

    def _taken_ahead(self) -> str | None:
        found = self.transfers.take_ahead()
        return None if found is None else found.model_dump_json()

    def _fetch(self, version: int) -> Steps[None]:
        """Brings the published copy to a version that is known to be published."""

        def wait() -> Steps[bool]:
            if self.transfers.reached >= version:
                yield from self.transfers.start_over()  # what is here is not what was published
            self.transfers.want(version, is_published=True)
            # Where the next round needs all that is published, it is merged as it comes.
            is_next = self.session.adopted.asked.needs(version + 1) == version
            with self.weights.written_through() if is_next else nullcontext():
                yield from self.transfers.until(lambda: self.transfers.reached >= version)
            return self.weights.can_merge()

        if not (yield from led(wait)):
            self._began = None  # it missed a round, so it sets out from the published weights
        yield from self._hold()

    def _prepare(self, reply: Assignment) -> Steps[None]:
        """Makes ready for a round that is given, and evaluates if that is asked for."""
        if reply.action == "train":
            yield from self._adopt(reply)
            yield from self._place(reply)
        if reply.evaluation is not None:
            waits = not self.session.adopted.asked.in_flight
            yield from self._held_out.evaluate(reply.evaluation, waits=waits)

    def _stop(self, reply: Assignment) -> Steps[None]:
        """The end: the model holds the published weights."""
        yield from self._settle(most=0)
        yield from self._set_out(self._newest + 1)
        if reply.evaluation is not None:
            yield from self._held_out.evaluate(reply.evaluation, waits=True)
        log.info("stopped", extra=reply.model_dump(include={"reason", "version", "digest"}))

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
        # What travels was made under the settings before.
        yield from self._settle(most=0)
        yield from led(self.transfers.rest)
        session.adopted = Adopted.of(info)
        self.weights.download = session.adopted.download
        self.continuity.adopt(info)
        self.transfers.go_on()
        body = session.adopted.manifest.body()
        log.info("settings adopted from the coordinator", extra={"manifest": body})


def _nothing() -> None:
    """Stands for work where there is none."""
