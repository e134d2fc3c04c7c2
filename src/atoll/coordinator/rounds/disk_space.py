"""Whether the disk has room, and when to look again after it had none.

Decides nothing about what waits for room: whoever was refused says so here, and the thread that
closes rounds asks before it tries again.
"""

import logging

from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.errors import StorageFull

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class DiskSpace:
    """What is known about the room on the disk; any thread may tell, the closing thread looks.

    Without a lock: a refusal that is told just as room is found is told again by the next one.
    """

    def __init__(self, blobs: Blobs, clock: Clock, *, needed_bytes: int) -> None:
        self._blobs = blobs
        self._clock = clock
        self._needed_bytes = needed_bytes  # for the largest thing that is written in one piece
        self._look_at = 0.0
        self.reason = ""  # why there is none; empty while there is

    def ran_out(self, error: StorageFull) -> None:
        """Something found no room."""
        if not self.reason:
            log.warning("no room on the disk", extra={"reason": str(error)})
            self._look_at = self._clock.now() + LOOK_SECONDS
        self.reason = str(error)

    def is_there(self) -> bool:
        """Whether writing is worth trying: looks by reserving, once in a while, after a refusal."""
        if not self.reason:
            return True
        if self._clock.now() < self._look_at:
            return False
        self._look_at = self._clock.now() + LOOK_SECONDS
        try:
            self._blobs.writer(expect_bytes=self._needed_bytes).abort()
        except StorageFull as error:
            self.reason = str(error)
            return False
        log.info("room on the disk again")
        self.reason = ""
        return True

    def check(self) -> None:
        """Raises StorageFull while there is none."""
        if self.reason:
            raise StorageFull(
                "the coordinator's disk is full; no contribution is taken and no round closes "
                "until there is room, so free some there"
            )
