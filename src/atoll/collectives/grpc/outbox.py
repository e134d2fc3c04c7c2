"""What goes to one peer, in order; a message is kept until the peer has said that it has it.

Written once for all carriers. When a stream breaks, the next one begins with the first message that
was not answered; the mailbox at the other end knows what it has.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from atoll.clock import Clock
from atoll.collectives.base import Label

Message = tuple[Label, Tensor]


class Outbox:
    """Thread-safe; one stream at a time takes messages from it, known by its number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: deque[Message] = deque()  # not answered yet, oldest first
        self._written = 0  # how many of them are on the present stream
        self._stream = 0
        self._is_closed = False
        self._ring: Callable[[], None] | None = None  # of a stream that sleeps
        self._cut: Callable[[], None] | None = None

    def put(self, label: Label, values: Tensor) -> None:
        """Never waits."""
        with self._changed:
            self._kept.append((label, values))
            self._wake()

    def flushed(self, until: float) -> bool:
        """Whether all is answered, at the latest at the time `until`."""
        left = max(0.0, until - self._clock.now())
        return self._clock.wait_for(lambda: not self._kept, self._changed, seconds=left)

    def close(self) -> None:
        """Nothing more is sent; the present stream is cut."""
        with self._changed:
            self._is_closed = True
            self._wake()
            cut = self._cut
        if cut is not None:
            cut()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # A stream's side

    @contextmanager
    def stream(self, cut: Callable[[], None]) -> Iterator[int]:
        """A new stream's number; it begins with the first message that was not answered.

        `cut` ends it from outside. Afterwards nothing is given to it any more.
        """
        with self._changed:
            self._written, self._stream = 0, self._stream + 1
            self._cut = cut
            number, is_closed = self._stream, self._is_closed
        if is_closed:
            cut()
        try:
            yield number
        finally:
            with self._changed:
                self._stream += 1
                self._cut = self._ring = None
                self._changed.notify_all()

    def is_over(self, stream: int) -> bool:
        return self._is_closed or self._stream != stream

    def next(self, stream: int) -> Message | None:
        """The next message, waited for; None when the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(stream) or self._written < len(self._kept))
            return None if self.is_over(stream) else self._given()

    def next_now(self, stream: int, ring: Callable[[], None]) -> Message | None:
        """The next message; None when there is none, and then `ring` is called once there is."""
        with self._changed:
            if self.is_over(stream) or self._written == len(self._kept):
                self._ring = ring
                return None
            return self._given()

    def answered(self, messages: int) -> None:
        """The peer has so many more of them."""
        with self._changed:
            for _ in range(messages):
                self._kept.popleft()
            self._written -= messages
            self._changed.notify_all()

    def wait_closed(self, seconds: float) -> None:
        """Returns early when there is nothing to wait for any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    @property
    def unanswered(self) -> int:
        """How many messages are on the present stream."""
        return self._written

    def _given(self) -> Message:
        self._written += 1
        return self._kept[self._written - 1]

    def _wake(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring()
        self._changed.notify_all()
