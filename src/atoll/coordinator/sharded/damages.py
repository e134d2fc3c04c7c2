"""A checkpoint that cannot be read: known once, so that no group is formed to fail on it again.

Ranks that hold the step on their disks go on from there. Where they do not, everybody waits, with
the reason, until the blob is back from a copy or an operator has cut the run back (`atoll repair`):
going back to an older checkpoint by itself would undo steps that were recorded for good.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.errors import BlobChanged, BlobMissing, StoreError
from atoll.ledger.ledger import Ledger
from atoll.protocol.sharded import Restore

log = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0  # until what was damaged is looked at again: it may be back from a copy
PIECE_BYTES = 1 << 20
LOST = (BlobMissing, BlobChanged)


@dataclass(eq=False)
class Damages:
    """Which blobs of the newest checkpoint, or of the initial weights, cannot be read.

    Thread-safe; `look` belongs to one thread, since it reads blobs whole.
    """

    ledger: Ledger
    blobs: Blobs
    clock: Clock
    initial: str  # the blob of the initial weights
    changed: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _found: dict[str, str] = field(default_factory=dict, init=False)  # why, by blob
    _looked: float = field(default=0.0, init=False)
    _is_suspected: bool = field(default=False, init=False)

    def note(self, blob: str, error: StoreError) -> None:
        """A blob that a group goes back to turned out to be missing or changed."""
        with self._lock:
            if blob in self._found:
                return
            self._found[blob] = str(error)
            self._looked = self.clock.now()
        log.error("a checkpoint is damaged", extra={"blob": blob, "reason": str(error)})
        self.changed()

    def suspect(self) -> None:
        """A group gave up before it had saved: what it went back to is looked at again."""
        with self._lock:
            self._is_suspected = True

    @property
    def is_any(self) -> bool:
        """Whether anything is known to be damaged."""
        return bool(self._found)

    def reason(self, restore: Restore) -> str:
        """Why nobody can go back to this, and the way out; empty when nothing is known."""
        if restore.source == "save":
            return ""
        with self._lock:
            lost = [(blob, self._found[blob]) for blob in restore.parts if blob in self._found]
        if not lost:
            return ""
        what = f"checkpoint of step {restore.step}" if restore.step else "initial weights"
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        blob, why = lost[0]
        return (
            f"blob {blob}{more} of the {what} cannot be read, and the ranks that ask do not hold "
            f"that step: {why}; put the blob back from a copy, bring back the ranks that saved the "
            f"step, or stop the coordinator and cut the run back with `atoll repair`"
        )

    def look(self) -> None:
        """Reads again what is suspected, or was damaged a while ago."""
        with self._lock:
            known, is_suspected = list(self._found), self._is_suspected
            is_time = bool(known) and self.clock.now() - self._looked >= AGAIN_SECONDS
            if not is_suspected and not is_time:
                return
            self._is_suspected, self._looked = False, self.clock.now()
        for blob in {*known, *(self._newest() if is_suspected else ())}:
            try:
                self._check(blob)
            except LOST as error:
                self.note(blob, error)
            except StoreError:
                continue  # the store is away, which says nothing about the blob
            else:
                with self._lock:
                    is_back = self._found.pop(blob, None) is not None
                if is_back:
                    log.info("a damaged blob is back", extra={"blob": blob})
                    self.changed()

    def _newest(self) -> tuple[str, ...]:
        with self.ledger.reading() as t:
            checkpoint = t.checkpoints.newest()
        return (self.initial,) if checkpoint is None else checkpoint.blobs

    def _check(self, blob: str) -> None:
        """Hashes the bytes, also of a blob that was right when it was first opened."""
        found = hashlib.sha256()
        with self.blobs.open(blob) as reader:
            for start in range(0, reader.nbytes, PIECE_BYTES):
                found.update(reader.read(start, min(PIECE_BYTES, reader.nbytes - start)))
        if found.hexdigest() != blob:
            raise BlobChanged(f"blob {blob} now has the sha256 {found.hexdigest()}")
