"""What travels beside the training: contributions on their way in, versions on their way here.

Two threads of the leader alone, `sending` and `following`, without a collective between ranks; the
training hands over, goes on, and looks at what has become of it where the strategy wants it to.
What travels changes the published copy, the disk and the standing, never the local weights.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.island.conversation import hand_in
from atoll.island.conversation.asking import ask
from atoll.island.conversation.fetch import receive
from atoll.island.conversation.hand_in import HandIn
from atoll.island.conversation.intents import Steps, Until
from atoll.island.conversation.session import Session
from atoll.island.state.continuity import Continuity
from atoll.island.state.weights import IslandWeights
from atoll.protocol.messages import Assignment

NOWHERE = -1  # in place of a version: none is here, or wanted


@dataclass(frozen=True)
class Settled:
    """What has become of hand-ins since somebody last asked."""

    accepted: tuple[int, ...]  # rounds, oldest first
    is_refused: bool  # one was, and whatever was handed in after it is dropped


class Transfers:
    """The mailbox between an island's training and its transfers.

    `sending` and `following` belong to a thread each, everything else to the training. All fields
    are changed within `_changing`, which wakes whoever waits; nobody is in it while something
    travels.
    """

    def __init__(self, session: Session, weights: IslandWeights, continuity: Continuity) -> None:
        self._session = session
        self._weights = weights
        self._continuity = continuity
        self._changed = threading.Condition()
        self._queue: deque[HandIn] = deque()
        self._words: deque[Steps[None]] = deque()  # messages that nobody waits for
        self.under_way: tuple[int, ...] = ()  # rounds handed in and not answered, oldest first
        self._accepted: tuple[int, ...] = ()
        self._is_refused = False
        self._failure: Exception | None = None
        self._wanted = NOWHERE  # the version that is to be here as soon as it is published
        self._published = NOWHERE  # a version that is known to be
        self._training: int | None = None  # the round for which the next one is asked ahead
        self._asked: tuple[int, int | None] | None = None  # for which, with which version, it was
        self._ahead: deque[Assignment] = deque()  # rounds that follow it, oldest first
        self._is_called = False  # by the coordinator, away from what is trained
        self._is_resting = False
        self._is_receiving = False
        self.is_closed = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock over all fields; whoever waits for a change looks again."""
        with self._changed:
            yield
            self._changed.notify_all()

    # The training's side

    def close(self) -> None:
        """Both threads end when they next look."""
        with self._changing():
            self.is_closed = True

    def check(self) -> None:
        """Raises what has ended a transfer for good."""
        if self._failure is not None:
            raise self._failure

    def until(self, holds: Callable[[], object]) -> Steps[None]:
        """Waits until `holds`; raises when it never will."""
        yield Until(lambda: self._failure is not None or holds(), self._changed)
        self.check()

    def send(self, made: HandIn) -> None:
        """Sends a contribution after those before it; after a refusal it would not count."""
        with self._changing():
            if not self._is_refused:
                self.under_way = (*self.under_way, made.round)
                self._queue.append(made)

    def say(self, words: Steps[None]) -> None:
        """Sends a message before anything else is fetched; hand-ins do not wait for it."""
        with self._changing():
            self._words.append(words)

    def settle(self, *, most: int) -> Steps[Settled]:
        """Waits until `most` hand-ins are under way, or one is refused; what became of others.

        With none, nothing else is waiting to be sent either.
        """

        def is_settled() -> bool:
            return len(self.under_way) <= most and (most > 0 or not self._words)

        yield from self.until(lambda: self._is_refused or is_settled())
        with self._changing():
            found = Settled(self._accepted, self._is_refused)
            self._accepted = ()
        return found

    def forgive(self) -> None:
        """Everything handed in is dropped; the next contribution is another beginning."""
        with self._changing():
            self._queue.clear()
            self.under_way, self._accepted, self._is_refused = (), (), False
            self._ahead.clear()

    @property
    def is_given_up(self) -> bool:
        """Whether what is trained now does not count, or must wait for something else."""
        return self._is_refused or self._is_called

    def want(self, version: int, *, is_published: bool = False) -> None:
        """Brings the published copy to `version`, one round after the other."""
        with self._changing():
            self._wanted = max(version, self._wanted)
            if is_published:
                self._published = max(version, self._published)

    def arrived(self, version: int) -> Steps[bool]:
        """Waits until the published copy has come to `version`.

        False when what is trained meanwhile must be given up: a hand-in before it is refused, or
        the version waits for this island itself.
        """
        yield from self.until(lambda: self.is_given_up or self.reached >= version)
        return not self.is_given_up

    def answer(self) -> None:
        """The training asks what to do: it needs not be called any more."""
        with self._changing():
            self._is_called = False

    def start_over(self) -> Steps[None]:
        """Gives the published copy up: the next one is fetched whole."""
        yield from self.rest()
        self._weights.forget()
        with self._changing():
            self._is_resting, self._wanted, self._published = False, NOWHERE, NOWHERE

    def look_ahead(self, round_number: int | None) -> None:
        """From now on asks what comes after the round that is trained; None: no more."""
        with self._changing():
            self._training = round_number

    def take_ahead(self) -> Assignment | None:
        """The next round of those that were asked for ahead, once."""
        with self._changing():
            self._training = None
            if self.is_given_up:
                self._ahead.clear()
            return self._ahead.popleft() if self._ahead else None

    def rest(self) -> Steps[None]:
        """Waits until the published copy is whole, and keeps it as it is until `go_on`."""
        with self._changing():
            self._is_resting = True
        yield from self.until(lambda: not self._is_receiving)

    def rests(self) -> bool:
        """Keeps the published copy as it is until `go_on`, if it is whole now; whether it does."""
        with self._changing():
            self._is_resting = not self._is_receiving
            return self._is_resting

    def go_on(self) -> None:
        """The published copy may move again."""
        with self._changing():
            self._is_resting = False

    # The threads' side

    def sending(self) -> Steps[None]:
        """Sends what is handed over, in order, until it is closed or something ends it."""
        try:
            while not self.is_closed:
                if self._queue:
                    yield from self._send(self._queue[0])
                else:
                    yield Until(lambda: self._queue or self.is_closed, self._changed)
        except Exception as error:
            self._fail(error)

    def _send(self, made: HandIn) -> Steps[None]:
        accepted = yield from hand_in.contribute(self._session, self._continuity, made)
        with self._changing():
            if not self._queue or self._queue[0] is not made:
                return  # everything was dropped meanwhile
            self._queue.popleft()
            self.under_way = self.under_way[1:]
            if accepted:
                self._accepted = (*self._accepted, made.round)
            else:
                self._queue.clear()
                self.under_way, self._is_refused = (), True

    def _fail(self, error: Exception) -> None:
        """Nothing more is transferred; the training raises the error where it next looks."""
        with self._changing():
            self._failure = error

    def following(self) -> Steps[None]:
        """Brings the published copy to what is wanted, until it is closed or something ends it."""
        try:
            while not self.is_closed:
                if self._words:
                    yield from self._words[0]
                    with self._changing():
                        self._words.popleft()
                elif self._is_waiting or not self._has_work():
                    yield Until(self._is_woken, self._changed)
                elif self._looks_ahead():
                    yield from self._ask_ahead()
                else:
                    yield from self._follow()
        except Exception as error:
            self._fail(error)

    @property
    def _is_waiting(self) -> bool:
        """Whether the training must act first."""
        return self._is_resting or self._is_called

    def _is_woken(self) -> bool:
        has_work = self._has_work() and not self._is_waiting
        return bool(self.is_closed or self._words or has_work)

    def _has_work(self) -> bool:
        return self._is_behind() or self._looks_ahead()

    def _looks_ahead(self) -> bool:
        """Whether the next round may be known now: it opens with a version, so once for each."""
        training, version = self._training, self._weights.held[0]
        return None not in (training, version) and (training, version) != self._asked

    def _is_behind(self) -> bool:
        return self._wanted > self.reached

    @property
    def reached(self) -> int:
        """The version that is here."""
        version, _ = self._weights.held
        return NOWHERE if version is None else version

    def _follow(self) -> Steps[None]:
        """One round further, as soon as it is published; without a copy, all of it."""
        version, _ = self._weights.held
        if version is not None and self._published <= version:
            busy = self.under_way
            asked = yield from self._session.call(
                lambda: ask(self._session, self._weights, awaits=version + 1, under_way=busy)
            )
            with self._changing():
                self._is_called = asked.action in ("train", "stop")
                if asked.action != "fetch":
                    return
                self._published = max(self._published, asked.version)
        with self._changing():
            if self._is_resting:
                return
            self._is_receiving = True
        try:
            yield from receive(self._session, self._weights, newest=self._published)
        finally:
            with self._changing():
                self._is_receiving = False

    def _ask_ahead(self) -> Steps[None]:
        """Asks for rounds after the one that is trained, so that its end waits for nobody.

        As many as are open: a link may stand still until they are needed.
        """
        with self._changing():
            training = self._training
            if training is None:
                return
            ahead = [given.round or 0 for given in self._ahead]
            busy = (*self.under_way, training, *ahead)
            version = self._weights.held[0]
        asked = yield from self._session.call(
            lambda: ask(self._session, self._weights, under_way=busy, wait_seconds=0.0)
        )
        with self._changing():
            if asked.action != "train":
                self._asked = (training, version)
            elif self._training == training and not self.is_given_up:
                self._ahead.append(asked)
