"""Whether the disk has room and files can be opened, and when to look again after it was not so.

Decides nothing about what waits for room: whoever was refused says so here, and the thread that
closes rounds asks before it tries again.
"""

import logging
from dataclasses import dataclass, field

from atoll import open_files
from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.errors import Exhausted, StorageFull
from atoll.wire import statuses

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
FILES_NEEDED = 24  # free at once before a round is tried again: its sources, frame and blobs


_LACKS: dict[type[StorageFull], str] = {
    StorageFull: "no room on the disk",
    Exhausted: "no file can be opened",
}
_SENTENCES: dict[type[StorageFull], str] = {
    StorageFull: "the coordinator's disk is full; no contribution is taken and no round closes "
    "until there is room, so free some there",
    Exhausted: "the coordinator can open no more files; no contribution is taken and no round "
    "closes until some are free, so give it a higher `ulimit -n`",
}


def _kind_of(error: StorageFull) -> type[StorageFull]:
    return Exhausted if isinstance(error, Exhausted) else StorageFull


@dataclass
class DiskSpace:
    """What is known about the room on the disk; any thread may tell, the closing thread looks.

    Without a lock: a refusal that is told just as room is found is told again by the next one.
    """

    blobs: Blobs
    clock: Clock
    needed_bytes: int  # for the largest thing that is written in one piece
    reason: str = field(default="", init=False)  # why there is no room; empty while there is
    _kind: type[StorageFull] = field(default=StorageFull, init=False)
    _look_at: float = field(default=0.0, init=False)

    def ran_out(self, error: StorageFull) -> None:
        """Something found no room, or no file that it could open."""
        if not self.reason:
            log.warning(_LACKS[_kind_of(error)], extra={"reason": str(error)})
            self._look_at = self.clock.now() + LOOK_SECONDS
        self._kind = _kind_of(error)
        self.reason = statuses.without_paths(str(error))  # workers see it

    def is_there(self) -> bool:
        """Whether a write is worth trying; after a refusal, room is looked for once a second."""
        if not self.reason:
            return True
        if self.clock.now() < self._look_at:
            return False
        self._look_at = self.clock.now() + LOOK_SECONDS
        try:
            if self._kind is Exhausted:
                open_files.check_some(FILES_NEEDED)
            self.blobs.writer(expect_bytes=self.needed_bytes).abort()
        except StorageFull as error:
            self._kind = _kind_of(error)
            self.reason = statuses.without_paths(str(error))  # workers see it
            return False
        log.info("room on the disk again" if self._kind is StorageFull else "files free again")
        self.reason = ""
        return True

    def check(self) -> None:
        """Raises StorageFull while there is no room."""
        if self.reason:
            raise self._kind(_SENTENCES[self._kind])
