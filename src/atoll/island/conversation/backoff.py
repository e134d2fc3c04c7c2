"""Steps that outlive a coordinator's absence: repeated with backoff and jitter until it is back."""

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from atoll.errors import AtollError
from atoll.island.conversation.intents import Pause, Steps

log = logging.getLogger(__name__)

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 5.0

T = TypeVar("T")


class Backoff:
    """Pauses between tries of one thing: each up to twice the one before, to a limit."""

    def __init__(self, jitter: random.Random) -> None:
        self._jitter = jitter
        self.wait_seconds = FIRST_SECONDS  # the next pause, at most

    def pause(self) -> Steps[None]:
        """Waits before the next try."""
        # Full jitter: islands that lost the same coordinator do not come back in step.
        yield Pause(self.wait_seconds * (0.5 + self._jitter.random() / 2))
        self.wait_seconds = min(LONGEST_SECONDS, self.wait_seconds * 2)


def repeated(make: Callable[[], Steps[T]], jitter: random.Random) -> Steps[T]:
    """Carries out `make`'s steps, again and again while their error is one that may pass."""
    backoff = Backoff(jitter)
    while True:
        try:
            return (yield from make())
        except AtollError as error:
            if not error.retry:
                raise
            about = {"reason": str(error), "wait_seconds": round(backoff.wait_seconds, 2)}
            log.warning("coordinator away, trying again", extra=about)
        yield from backoff.pause()
