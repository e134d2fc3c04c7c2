"""Blobs in the making as temporary files, and random access to a finished file.

Shared by the stores that keep bytes in files. Decides nothing about names, syncing or visibility.
"""

import contextlib
import hashlib
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from atoll import files as filesystem
from atoll.blobs.base import BlobReader, BlobRef, BlobWriter
from atoll.errors import StoreError
from atoll.files import Identity, SystemFiles

HASH_CHUNK_BYTES = 1 << 20  # reading and hashing in pieces that stay in cache
WRITEBACK_BYTES = 8 << 20
OWN_NAME = re.compile(r"[0-9]+-[0-9]+\.part|[0-9a-f]{64}")


class FileDraft(BlobWriter):
    """A writer to a temporary file of `drafts`; `expect_bytes` of room are reserved first."""

    def __init__(
        self, drafts: "Drafts", commit: Callable[[Self], BlobRef], *, expect_bytes: int | None
    ) -> None:
        self._files = drafts.files
        self._will_sync = drafts.will_sync
        self._reserved = expect_bytes or 0
        self._handed_over = 0
        self.path, self.fd = _create(drafts.files, drafts.directory)
        super().__init__(commit, name=repr(str(self.path)))
        if self._reserved:
            with self.dropped_on_error():
                filesystem.reserve(self.fd, self._reserved, path=self.path, files=self._files)

    def _append(self, view: memoryview) -> None:
        """Writes without a copy; a short write is continued."""
        rest = view
        with self.dropped_on_error():
            while len(rest):
                with filesystem.naming("write", self.path):
                    rest = rest[self._files.write(self.fd, rest) :]
        written = self.nbytes + len(view)
        if self._will_sync and written - self._handed_over >= WRITEBACK_BYTES:
            # Only a hint: where it is refused, the sync does all the work.
            with contextlib.suppress(OSError):
                self._files.start_writeback(self.fd, self._handed_over, written - self._handed_over)
            self._handed_over = written

    def finish(self) -> None:
        """Gives back the room that was reserved and not used."""
        self.check_open()
        if self._reserved > self.nbytes:
            with filesystem.naming("write", self.path):
                self._files.truncate(self.fd, self.nbytes)

    def close(self) -> None:
        """Closes the descriptor and leaves the file, which now belongs to another name."""
        if self.is_open:
            self.is_open = False
            self._files.close(self.fd)

    def drop(self) -> None:
        if self.is_open:
            self.close()
            # What cannot be removed now is swept at the next start; it must not hide the error
            # that led here.
            with contextlib.suppress(OSError):
                self._files.remove(self.path)

    @contextlib.contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Drops the draft when the block raises."""
        try:
            yield
        except BaseException:
            self.drop()
            raise


@dataclass
class Drafts:
    """The drafts of one store, in a directory of their own; several threads may share it.

    Drafts that `will_sync` hand finished ranges to the disk early, so that their sync finds little
    left to do.
    """

    files: SystemFiles
    directory: Path
    will_sync: bool = False
    _made: weakref.WeakSet[FileDraft] = field(default_factory=weakref.WeakSet)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new(self, commit: Callable[[FileDraft], BlobRef], *, expect_bytes: int | None) -> FileDraft:
        """An empty draft; StorageFull when `expect_bytes` find no room."""
        draft = FileDraft(self, commit, expect_bytes=expect_bytes)
        with self._lock:
            self._made.add(draft)
        return draft

    def sweep(self) -> None:
        """Removes what earlier lives left in the directory: drafts, and copies by their sha256."""
        kept = {draft.path for draft in self._alive()}
        with filesystem.naming("sweep", self.directory):
            for path in list(self.directory.iterdir()):
                if path not in kept and OWN_NAME.fullmatch(path.name):
                    self.files.remove(path)

    def drop_all(self) -> None:
        """Drops the drafts that are still open; their writers refuse further calls."""
        for draft in self._alive():
            draft.drop()

    def _alive(self) -> list[FileDraft]:
        with self._lock:
            return [draft for draft in self._made if draft.is_open]


class FileReader(BlobReader):
    """Reads one finished file by position; safe to share between threads until `close`."""

    def __init__(self, files: SystemFiles, fd: int, *, path: Path, nbytes: int) -> None:
        self._files = files
        self._fd = fd
        self._path = path
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        self._check(offset, nbytes)
        with filesystem.naming("read", self._path):
            data = os.pread(self._fd, nbytes, offset)
        if len(data) == nbytes:
            return data
        # One pread gives at most about 2 GiB, and less when the file was cut behind our back.
        whole = bytearray(nbytes)
        filesystem.read_into(self._fd, offset, memoryview(whole), path=self._path)
        return bytes(whole)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, buffer.nbytes)
        filesystem.read_into(self._fd, offset, buffer, path=self._path)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            # Blobs are read once and kept for long: their pages serve the next upload better. On a
            # virtual machine a fresh page costs far more than a freed one (measured: a write of
            # 100 MB takes 100 to 200 ms into fresh pages, 24 ms into freed ones).
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self.release()

    def _check(self, offset: int, nbytes: int) -> None:
        if self._fd < 0:
            raise StoreError(f"the reader of {str(self._path)!r} is closed; open the blob again")
        check_range(offset, nbytes, size=self.nbytes, name=str(self._path))


def check_range(offset: int, nbytes: int, *, size: int, name: str) -> None:
    """Raises StoreError unless `nbytes` from `offset` lie inside a blob of `size` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise StoreError(
            f"{nbytes} bytes from {offset} were asked of {name!r}, which holds {size}; "
            f"a read must lie inside the blob"
        )


def hash_file(fd: int, nbytes: int, *, path: Path) -> str:
    """sha256 of the first `nbytes` of a file, with a bounded buffer."""
    state = hashlib.sha256()
    buffer = memoryview(bytearray(min(HASH_CHUNK_BYTES, nbytes)))
    for offset in range(0, nbytes, HASH_CHUNK_BYTES):
        piece = buffer[: min(HASH_CHUNK_BYTES, nbytes - offset)]
        filesystem.read_into(fd, offset, piece, path=path)
        state.update(piece)
    return state.hexdigest()


def settled_hash(files: SystemFiles, fd: int, *, path: Path) -> tuple[str, Identity]:
    """The sha256 and the identity of a file; StoreError when it changed while it was hashed."""
    before = files.identity(fd)
    found = hash_file(fd, before.nbytes, path=path)
    after = files.identity(fd)
    if before != after:
        raise StoreError(f"{str(path)!r} is being written to while it is read; stop the writer")
    return found, after


# Names only have to differ between the drafts of one process; those of earlier lives are stepped
# over, and swept at start.
_SERIAL = itertools.count()


def _create(files: SystemFiles, directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{os.getpid()}-{next(_SERIAL)}.part"
        with filesystem.naming("create", path), contextlib.suppress(FileExistsError):
            return path, files.create(path)
