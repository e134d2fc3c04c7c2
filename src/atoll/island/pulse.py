"""Heartbeats from a thread of their own, so that a long step is not taken for a death."""

import logging
import threading
from collections.abc import Callable

from atoll.errors import AtollError
from atoll.island.participant import Participant

log = logging.getLogger(__name__)

BROKEN_SECONDS = 2.0  # by default, until the next try after an error that nobody expected


class Repeating:
    """A thread beside the training: does `once` until it is stopped, and waits as long as it says.

    `end`, called from the thread that stops it, ends a `once` that is under way; `broken` says how
    long to wait after an error that nobody expected.
    """

    def __init__(
        self,
        name: str,
        once: Callable[[], float],
        *,
        end: Callable[[], None] = lambda: None,
        broken: Callable[[], float] = lambda: BROKEN_SECONDS,
    ) -> None:
        self._once = once
        self._end = end
        self._broken = broken
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Returns once the thread has ended."""
        self._stopped.set()
        self._end()
        self._thread.join()

    def _loop(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            try:
                pause = self._once()
            except Exception as error:
                # A thread that ended would leave the island without a pulse and without a word.
                log.error("%s broke, it is tried again", self._thread.name, exc_info=error)
                pause = self._broken()


def pulse(run: Participant) -> Repeating:
    """Beats every interval; a missed beat is logged and the next one tries again."""

    def interval() -> float:
        return run.manifest.heartbeat_interval

    def beat() -> float:
        try:
            run.beat()
        except AtollError as error:
            # The training thread meets the same error at its next call and acts on it.
            log.warning("heartbeat missed", extra={"code": error.code, "reason": str(error)})
        return interval()

    return Repeating("pulse", beat, broken=interval)
