"""The thread that closes rounds: it wakes on every change and on a tick, and does what is due."""

import logging
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from atoll.coordinator.authority import Authority

log = logging.getLogger(__name__)


@dataclass
class ClosingThread:
    """Calls `advance` from one thread. A failure there is fatal: weights in memory may be torn."""

    coordinator: Authority
    _: KW_ONLY
    tick_seconds: float
    on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="closing", daemon=True)
        self.coordinator.on_change(self._wake.set)

    def start(self) -> None:
        """Begins; a round that froze before a crash is computed first."""
        self._wake.set()
        self._thread.start()

    def stop(self, *, timeout_seconds: float) -> bool:
        """Asks the thread to end after what it is doing; whether it ended in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self.tick_seconds)
                self._wake.clear()
                while not self._stopping and self.coordinator.advance():
                    pass
        except BaseException as exc:
            log.critical("closing a round failed, the coordinator stops", exc_info=exc)
            self.on_failure(exc)
