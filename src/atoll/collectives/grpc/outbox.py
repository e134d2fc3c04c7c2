"""What goes to one peer, in order; a message is kept until the peer has said that it has it.

Written once for all carriers. When a stream breaks, the next one begins with the first message that
was not answered; the mailbox at the other end knows what it has.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from torch import Tensor

from atoll.clock import Clock
from atoll.collectives.base import Label
from atoll.errors import ProtocolError

Message = tuple[Label, Tensor]
ANSWERS_EVERY = 4  # messages; and when a sender asks, because somebody waits


class Ask(Enum):
    """What goes to a peer besides messages."""

    ANSWER_NOW = "say which messages lie in the mailbox"


Callback = Callable[[], object]


class Outbox:
    """Thread-safe; one stream at a time takes messages from it."""

    def __init__(self, clock: Clock) -> None:
        self.changed = threading.Condition()
        self.reading = threading.Lock()  # held by whoever reads a message's values
        self.kept: deque[Message] = deque()  # not answered yet, oldest first
        self.is_closed = False
        self.is_waited_for = False
        self._is_given_up = False
        self._clock = clock
        self._stream: Stream | None = None

    def put(self, label: Label, values: Tensor) -> None:
        """Never waits."""
        with self.changed:
            self.kept.append((label, values))
            self._tell()

    def flushed(self, until: float) -> bool:
        """Whether all is answered, at the latest at the time `until` or when it is given up."""
        left = max(0.0, until - self._clock.now())
        with self.changed:
            if not self.kept:
                return True
            self.is_waited_for = True
            self._tell()
        self._clock.wait_for(lambda: not self.kept or self._is_given_up, self.changed, seconds=left)
        return not self.kept and not self._is_given_up

    def linger(self, until: float) -> None:
        """Waits until all is answered, given up or not, at the latest until then."""
        with self.changed:
            self.is_waited_for = bool(self.kept)
            self._tell()
        left = max(0.0, until - self._clock.now())
        self._clock.wait_for(lambda: not self.kept or self.is_closed, self.changed, seconds=left)

    def give_up(self) -> None:
        """Nobody waits any more for what was not answered."""
        with self.changed:
            self._is_given_up = True
            self.changed.notify_all()

    def close(self) -> None:
        """Nothing more is sent; the present stream is cut."""
        with self.changed:
            self.is_closed = True
        self.drop()

    def drop(self) -> None:
        """Forgets what was not answered, and cuts the present stream.

        When this returns nobody reads those values any more, so that they may change or go.
        """
        with self.changed:
            self.kept.clear()
            self.is_waited_for = False
            stream = self._stream
            if stream is not None:
                stream.has_ended = True
            self._tell()
        if stream is not None:
            stream.cut()
        with self.reading:
            pass

    def wait_closed(self, seconds: float) -> None:
        """Waits so long, or until it is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed, seconds)

    def wait_wanted(self) -> None:
        """Waits until there is something to send, or it is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or self.kept)

    @contextmanager
    def stream(self) -> Iterator["Stream"]:
        """A stream that begins with the first message that was not answered."""
        with self.changed:
            self._stream = stream = Stream(self)
        try:
            yield stream
        finally:
            with self.changed:
                self._stream, stream.has_ended = None, True
                self.changed.notify_all()

    def _tell(self) -> None:
        if self._stream is not None:
            self._stream.wake()
        self.changed.notify_all()


class Stream:
    """One attempt to carry what an outbox holds; after it has ended it is given nothing more."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._written = 0  # of what the outbox keeps
        self._has_asked = False  # since the last message
        self._ring: Callback | None = None  # of a carrier that sleeps
        self._cut: Callback | None = None
        self.has_ended = False

    @property
    def is_over(self) -> bool:
        return self.has_ended or self._outbox.is_closed

    def cut_by(self, cut: Callback) -> None:
        """How it is ended from outside, from now on; at once where it is over already."""
        with self._outbox.changed:
            self._cut = cut
        if self.is_over:
            cut()

    def cut(self) -> None:
        if self._cut is not None:
            self._cut()

    def next(self) -> Message | Ask | None:
        """The next thing to send, waited for; None when the stream is over."""
        with self._outbox.changed:
            self._outbox.changed.wait_for(lambda: self.is_over or self._has_more() or self._asks())
            return None if self.is_over else self._given()

    def next_now(self, ring: Callback) -> Message | Ask | None:
        """The next thing to send; None when there is none, and then `ring` is called once."""
        with self._outbox.changed:
            if not self.is_over and (self._has_more() or self._asks()):
                return self._given()
            self._ring = ring
            return None

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Around every use of a message's values; False: the stream is over, and they may be gone.

        What it holds must end soon when the stream is cut.
        """
        with self._outbox.reading:
            yield not self.is_over

    def answered(self, messages: int) -> None:
        """The peer has so many more of them; ProtocolError where so many were never written."""
        with self._outbox.changed:
            if self.has_ended:
                return  # what it carried was dropped
            if messages > self._written:
                raise ProtocolError(
                    f"a peer answered {messages} messages; {self._written} are on the way to it"
                )
            for _ in range(messages):
                self._outbox.kept.popleft()
            self._written -= messages
            if not self._outbox.kept:
                self._outbox.is_waited_for = False
                self._outbox.changed.notify_all()

    def wake(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring()

    def _has_more(self) -> bool:
        return self._written < len(self._outbox.kept)

    def _asks(self) -> bool:
        """Somebody waits for answers, and everything is written."""
        return self._outbox.is_waited_for and self._written > 0 and not self._has_asked

    def _given(self) -> Message | Ask:
        self._has_asked = not self._has_more()
        if self._has_asked:
            return Ask.ANSWER_NOW
        self._written += 1
        return self._outbox.kept[self._written - 1]
