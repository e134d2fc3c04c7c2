"""Signals that come before a coordinator serves: it ends at once, and well.

Heard from the first moment of `atoll serve` until its server listens to them itself. What the start
has recorded by then stands, and the next one takes it up as after a crash.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal came; not an Exception, which something on the way might take for its own."""


class EarlySignals:
    """What this process was told so far; for its main thread."""

    def __init__(self) -> None:
        self._told: signal.Signals | None = None
        self._holds_back = False

    def listen(self) -> None:
        """From now on a signal raises Stopped, once: a second must not cut short what closes."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        if self._told is None:
            self._told = signal.Signals(number)
            if not self._holds_back:
                self.check()

    @property
    def told(self) -> str | None:
        """What is said of it once a signal has come."""
        if self._told is None:
            return None
        return (
            f"stopped by {self._told.name} before it served; what is recorded stands, and the "
            f"next start goes on from it"
        )

    def check(self) -> None:
        """Stopped when a signal has come."""
        if self._told is not None:
            raise Stopped

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """For steps that belong together: what comes meanwhile is heard after them."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False
        self.check()


EARLY = EarlySignals()  # signals are the process's, so there is one
