"""Where a shard's memory is: in this process, or in a file that is mapped piece by piece.

What a file holds need not survive the process: it has no name, and saves are written elsewhere.
"""

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from atoll import open_files
from atoll.errors import ConfigError, DiskFailed, StorageFull

Offload = Literal["none", "cpu", "disk"]


class Room(Protocol):
    """A flat buffer of zeros at first."""

    values: Tensor  # flat

    def release(self, start: int, stop: int) -> None:
        """These elements are not needed for now; their memory may go, their values stay."""
        ...

    def close(self) -> None:
        """Nobody uses the values any more."""
        ...


class MemoryRoom:
    """Ordinary memory."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self.values = torch.zeros(elements, dtype=dtype)

    def release(self, start: int, stop: int) -> None:
        """Stays where it is."""

    def close(self) -> None:
        """Goes with its last user."""


class DiskRoom:
    """A file without a name in `directory`; what is released leaves the resident memory."""

    def __init__(self, elements: int, dtype: torch.dtype, directory: Path) -> None:
        self._itemsize = dtype.itemsize
        nbytes = max(1, elements) * dtype.itemsize
        try:
            with (
                open_files.scarce("make a file in", directory),
                tempfile.TemporaryFile(dir=directory, prefix="shard-") as file,
            ):
                # Reserved: a write through the mapping could not report a full disk.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._map = mmap.mmap(file.fileno(), nbytes)
        except OSError as exc:
            kind = StorageFull if exc.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
            raise kind(
                f"{nbytes} bytes for offload='disk' cannot be had in {str(directory)!r}: "
                f"{exc.strerror}; free space there, or set sharded.offload to 'cpu'"
            ) from exc
        self.values = torch.frombuffer(self._map, dtype=dtype, count=max(1, elements))[:elements]

    def release(self, start: int, stop: int) -> None:
        """Whole pages go; the mapping is shared, so the file keeps what was written to them."""
        page = mmap.PAGESIZE
        first = -(-start * self._itemsize // page) * page
        last = stop * self._itemsize // page * page
        if stop == len(self.values):
            last = len(self._map)
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """The file goes with its last view."""
        self.values = torch.empty(0, dtype=self.values.dtype)


def room(
    elements: int, dtype: torch.dtype, *, offload: Offload, directory: Path | None = None
) -> Room:
    """The room that a run's setting asks for.

    Weights are gathered into the processor's memory, so `none` and `cpu` are the same.
    """
    if offload != "disk":
        return MemoryRoom(elements, dtype)
    if directory is None:
        raise ConfigError("offload='disk' needs a directory for its file; give the island's state")
    return DiskRoom(elements, dtype, directory)
