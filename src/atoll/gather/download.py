"""An archive's object on its way to a file that all ranks of a machine share.

    the object's bytes | for each stretch of 4 MiB, in 8 bytes, how much of it is there

Each rank fetches its own stretches, each from where it ended, in this life or an earlier one.
Nothing is synced, and nothing here knows whether the bytes are right: whoever uses them checks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll import files
from atoll.gather.archive import Archive

STRETCH_BYTES = 4 << 20
_MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Download:
    """One object. One rank prepares it, then each may fetch."""

    path: Path
    key: str
    nbytes: int
    stretch_bytes: int = STRETCH_BYTES

    def prepare(self) -> bool:
        """Makes the file, with all its room, unless an earlier life has; whether one has.

        StorageFull where there is no room.
        """
        whole = self.nbytes + _MARK_BYTES * len(self._starts)
        with files.naming("write", self.path), self.path.open("ab") as file:
            fd = file.fileno()
            if os.fstat(fd).st_size == whole:
                return True
            files.SYSTEM.truncate(fd, 0)
            files.reserve(fd, whole, path=self.path)
            files.SYSTEM.truncate(fd, whole)  # also where nothing can be reserved
        return False

    def discard(self) -> None:
        """Forgets what is there."""
        self.path.unlink(missing_ok=True)

    def fetch(
        self, archive: Archive, *, rank: int, ranks: int, is_wanted: Callable[[], bool]
    ) -> None:
        """Brings this rank's stretches, behind what is there; stops early once it is not wanted."""
        with files.naming("write", self.path), self.path.open("r+b") as file:
            for index in range(rank, len(self._starts), ranks):
                if is_wanted():
                    self._fetch_stretch(archive, file.fileno(), index, is_wanted)

    def _fetch_stretch(
        self, archive: Archive, fd: int, index: int, is_wanted: Callable[[], bool]
    ) -> None:
        first = self._starts[index]
        stop = min(first + self.stretch_bytes, self.nbytes)
        place = self.nbytes + _MARK_BYTES * index
        done = int.from_bytes(os.pread(fd, _MARK_BYTES, place), "big")
        offset = first + (done if done <= stop - first else 0)
        for piece in archive.stream(self.key, self.nbytes, offset, stop):
            _write(fd, piece, offset)
            offset += len(piece)
            _write(fd, memoryview((offset - first).to_bytes(_MARK_BYTES, "big")), place)
            if not is_wanted():
                return

    @property
    def _starts(self) -> range:
        return range(0, self.nbytes, self.stretch_bytes)


def _write(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
