"""The presence stream, kept open from a thread of its own beside the heartbeats.

Its end is how the coordinator notices at once that this process was killed, so it is dialled again
as fast as a network allows: a break is forgiven for a second.
"""

import logging
import threading

from atoll.errors import AtollError, Fenced
from atoll.island.link.base import Attendance
from atoll.island.participant import Participant
from atoll.island.pulse import Repeating

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.1  # how often it is looked whether the island has registered
FIRST_SECONDS = 0.05
LONGEST_SECONDS = 2.0


class Attending:
    """Opens the stream again whenever it ended; a thread, or a simulated fiber, repeats `once`."""

    def __init__(self, run: Participant) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._open: Attendance | None = None
        self._ended = False
        self._failures = 0

    def once(self) -> float:
        """Holds one stream until it ends; returns the seconds until the next try."""
        try:
            attendance = self._run.attend()
            if attendance is None:
                return IDLE_SECONDS
            self._failures = 0
            with self._lock:
                self._open = attendance
                if self._ended:
                    attendance.close()
            attendance.wait()
        except Fenced as error:
            # The training thread meets the same error at its next call and stops.
            log.warning("presence refused", extra={"code": error.code, "reason": str(error)})
            return LONGEST_SECONDS
        except AtollError as error:
            log.info("presence broken", extra={"code": error.code, "reason": str(error)})
            self._failures += 1
        return min(LONGEST_SECONDS, FIRST_SECONDS * (1 << min(self._failures, 10)))

    def end(self) -> None:
        """Ends the stream that is open, from any thread, and any that is opened later."""
        with self._lock:
            self._ended = True
            if self._open is not None:
                self._open.close()


def presence(run: Participant) -> Repeating:
    """Keeps the stream open; once it is stopped, an island that has not left is missed."""
    attending = Attending(run)
    return Repeating("presence", attending.once, end=attending.end)
