"""Local copies of remote blobs under a byte budget; the least recently used goes first.

Holds only bytes that its caller has verified, and serves one only while its file is untouched.
Losing a copy costs a download, so nothing here is synced.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

from atoll import files as filesystem
from atoll import open_files
from atoll.blobs.drafts import OWN_NAME, FileDraft, FileReader
from atoll.files import SYSTEM, Identity


class CachedFiles:
    """Verified copies in one directory that no other process uses; threads may share it."""

    def __init__(self, directory: Path, *, budget_bytes: int) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[str, Identity] = OrderedDict()
        self._lock = threading.Lock()

    def adopt(self, sha256: str, draft: FileDraft) -> FileReader:
        """Takes over a finished draft and returns a reader of it.

        The reader stays good when the copy is evicted at once: the file lives on until it closes.
        """
        path = self._directory / sha256
        with self._lock:
            with draft.dropped_on_error(), filesystem.naming("keep a copy at", path):
                SYSTEM.rename(draft.path, path)
                fd = SYSTEM.open(path)
            draft.close()
            self._held[sha256] = SYSTEM.identity(fd)
            self._held.move_to_end(sha256)
            self._evict()
        return FileReader(SYSTEM, fd, path=path, nbytes=draft.nbytes)

    def open(self, sha256: str) -> FileReader | None:
        """A reader of the copy, or None when there is none or its file was touched."""
        path = self._directory / sha256
        with self._lock:
            known = self._held.get(sha256)
            if known is None:
                return None
            with contextlib.suppress(OSError):
                with open_files.scarce("open", path):
                    fd = SYSTEM.open(path)
                if SYSTEM.identity(fd) == known:
                    self._held.move_to_end(sha256)
                    return FileReader(SYSTEM, fd, path=path, nbytes=known.nbytes)
                SYSTEM.close(fd)
            self._forget(sha256)
            return None

    def drop(self, sha256: str) -> None:
        """Forgets and removes one copy; harmless when there is none."""
        with self._lock:
            self._forget(sha256)

    def sweep(self) -> None:
        """Removes the files that an earlier life left."""
        with self._lock, filesystem.naming("sweep", self._directory):
            for name in os.listdir(self._directory):
                if name not in self._held and OWN_NAME.fullmatch(name):
                    SYSTEM.remove(self._directory / name)

    def clear(self) -> None:
        """Removes every copy."""
        with self._lock:
            for sha256 in list(self._held):
                self._forget(sha256)

    def _evict(self) -> None:
        while sum(held.nbytes for held in self._held.values()) > self._budget_bytes:
            self._forget(next(iter(self._held)))

    def _forget(self, sha256: str) -> None:
        self._held.pop(sha256, None)
        path = self._directory / sha256
        with filesystem.naming("remove", path):
            SYSTEM.remove(path)
