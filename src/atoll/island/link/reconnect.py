"""Calls that outlive a coordinator's absence: repeated with backoff and jitter until it is back."""

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from atoll.clock import Clock
from atoll.errors import AtollError

log = logging.getLogger(__name__)

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 5.0

T = TypeVar("T")


class Backoff:
    """Pauses between tries of one thing: each up to twice the one before, to a limit.

    For the one thread that tries.
    """

    def __init__(self, clock: Clock, jitter: random.Random) -> None:
        self._clock = clock
        self._jitter = jitter
        self.wait_seconds = FIRST_SECONDS  # the next pause, at most

    def pause(self) -> None:
        """Waits before the next try."""
        # Full jitter: islands that lost the same coordinator do not come back in step.
        self._clock.sleep(self.wait_seconds * (0.5 + self._jitter.random() / 2))
        self.wait_seconds = min(LONGEST_SECONDS, self.wait_seconds * 2)


class Reconnect:
    """Repeats calls whose error says that the same message can succeed later. Thread-safe."""

    def __init__(self, clock: Clock, jitter: random.Random) -> None:
        self._clock = clock
        self._jitter = jitter

    def backoff(self) -> Backoff:
        """Pauses on this clock, the first one short."""
        return Backoff(self._clock, self._jitter)

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work`; errors that are final pass through."""
        backoff = self.backoff()
        while True:
            try:
                return work()
            except AtollError as error:
                if not error.retry:
                    raise
                log.warning(
                    "coordinator away, trying again",
                    extra={"reason": str(error), "wait_seconds": round(backoff.wait_seconds, 2)},
                )
                backoff.pause()
