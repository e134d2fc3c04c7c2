"""SIGTERM and SIGINT while `atoll serve` is still starting: it ends at once, with exit code 0.

From the first moment of the command until its server handles signals itself. What was recorded by
then stays, and the next start goes on from there as it would after a crash.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal came. A BaseException, so that no `except Exception` on the way swallows it."""


class EarlySignals:
    """The first signal that this process got. Main thread only: Python runs handlers there."""

    def __init__(self) -> None:
        self._told: signal.Signals | None = None
        self._holds_back = False
        self._listens = False

    def listen(self) -> None:
        """From now on the first signal raises Stopped; later ones must not disturb the closing."""
        self._listens = True
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def end(self) -> None:
        """All is closed: signals mean nothing from now on; nothing where none were listened for.

        An interpreter that winds down gives signals their default back, unless they are ignored: a
        coordinator that had ended well would be one that was killed.
        """
        if self._listens:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _hear(self, number: int, _frame: object) -> None:
        if self._told is None:
            self._told = signal.Signals(number)
            if not self._holds_back:
                self.check()

    @property
    def told(self) -> str | None:
        """The sentence that tells which signal ended the start; None while there was none."""
        if self._told is None:
            return None
        return (
            f"stopped by {self._told.name} before it served; what is recorded stands, and the "
            f"next start goes on from it"
        )

    def check(self) -> None:
        """Raises Stopped if a signal has come."""
        if self._told is not None:
            raise Stopped

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Lets the steps in the block finish together: a signal meanwhile raises after them."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False
        self.check()


EARLY = EarlySignals()  # signals are the process's, so there is one
