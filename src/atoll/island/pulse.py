"""Heartbeats from a thread of their own, so that a long step is not taken for a death."""

import logging
import threading

from atoll.errors import AtollError
from atoll.island.run import Run

log = logging.getLogger(__name__)


class Pulse:
    """Beats every interval until stopped; a missed beat is logged and the next one tries again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="pulse", daemon=True)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beats no more."""
        self._stopped.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(self._run.manifest.heartbeat_interval):
            try:
                self._run.beat()
            except AtollError as error:
                # The training thread meets the same error at its next call and acts on it.
                log.warning("heartbeat missed", extra={"code": error.code, "reason": str(error)})
            except Exception as error:
                # Without a pulse the island would be evicted again and again and nobody knew why.
                log.error("heartbeat broke, the next one tries again", exc_info=error)
