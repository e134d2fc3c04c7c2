"""Published frames on disk, ready to be streamed: a download never holds a whole payload in memory.

Spool files can be computed again from the ledger, so they are neither synced nor kept over a
restart. A file that is being read outlives its removal until the last reader closes it.
"""

import hashlib
import os
import threading
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from atoll.blobs import files as filesystem
from atoll.codecs.base import Codec
from atoll.errors import StorageFull, StoreError
from atoll.layout import Layout, Span, byte_view
from atoll.wire import frame
from atoll.wire.header import FrameHeader


class SpooledFrame:
    """One complete frame; positioned reads from any thread."""

    def __init__(self, path: Path, fd: int, header: FrameHeader, nbytes: int) -> None:
        self.path = path
        self.header = header
        self.nbytes = nbytes
        self.tag = f"{header.kind}-{header.round}-{header.result_digest}"
        self._fd = fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`."""
        return os.pread(self._fd, nbytes, offset)

    def remove(self) -> None:
        """Takes the file's name away; readers go on until they are done."""
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass
class FrameSpooler:
    """Fills one spool file tile by tile, in any order; used by one thread.

    With `pool` a tile is written in a thread of it while the next one is made: an error then shows
    at the call after. A file that could not be written, or was never finished, is taken away again.
    """

    path: Path
    layout: Layout
    codec: Codec
    header: FrameHeader  # result_digest is a stand-in of the right length until `finish`
    pool: Executor | None = None

    def __post_init__(self) -> None:
        self._fd = -1
        self._payload_offset = len(frame.preamble(self.header, digest_checked=True))
        self._behind: Future[None] | None = None
        with filesystem.naming("open", self.path):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        # Room for all of it before the first byte: an outer step must not find out halfway.
        nbytes = frame.frame_bytes(self.header)
        try:
            with filesystem.naming(f"reserve {nbytes} bytes for", self.path):
                filesystem.SystemFiles().reserve(self._fd, nbytes)
        except StoreError:
            self._discard()
            raise

    def __call__(self, span: Span, payload: Tensor) -> None:
        offset, nbytes = frame.locate(self._payload_offset, self.codec, span)
        assert payload.numel() == nbytes, (payload.numel(), nbytes)
        self._write(byte_view(payload), offset)

    def finish(self, *, result_digest: str) -> SpooledFrame:
        """Writes the preamble and the trailer; the frame is complete."""
        header = replace(self.header, result_digest=result_digest)
        preamble = frame.preamble(header, digest_checked=True)
        assert len(preamble) == self._payload_offset, (len(preamble), self._payload_offset)
        nbytes = frame.frame_bytes(header)
        self._write(memoryview(preamble), 0)
        trailer = hashlib.sha256(preamble).digest()
        self._write(memoryview(trailer), nbytes - len(trailer))
        self._settle()
        fd, self._fd = self._fd, -1
        return SpooledFrame(self.path, fd, header, nbytes)

    def _write(self, data: memoryview, offset: int) -> None:
        self._settle()
        if self.pool is not None:
            self._behind = self.pool.submit(self._write_now, data, offset)
            return
        try:
            self._write_now(data, offset)
        except StoreError:
            self._discard()
            raise

    def _settle(self) -> None:
        """Waits for the tile that is being written; raises what became of it."""
        if self._fd < 0:
            raise StorageFull(f"{str(self.path)!r} could not be written before; make room")
        if self._behind is None:
            return
        try:
            self._behind.result()
        except StoreError:
            self._discard()
            raise
        finally:
            self._behind = None

    def _write_now(self, data: memoryview, offset: int) -> None:
        with filesystem.naming("write", self.path):
            _pwrite_all(self._fd, data, offset)

    def _discard(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
            self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        if self._behind is not None:
            wait([self._behind])  # not under a write, which would go to whoever gets the fd next
        self._discard()


class Spool:
    """The frames that islands may download now: at most one update and one whole-weights frame."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.iterdir():
            leftover.unlink()
        self._lock = threading.Lock()
        self._frames: dict[str, SpooledFrame] = {}
        self._serial = 0

    def spooler(
        self, layout: Layout, codec: Codec, header: FrameHeader, *, pool: Executor | None = None
    ) -> FrameSpooler:
        """A new file to fill."""
        with self._lock:
            self._serial += 1
            path = self._directory / f"{header.kind}-{header.round}-{self._serial}.frame"
        return FrameSpooler(path, layout, codec, header, pool)

    def put(self, spooled: SpooledFrame) -> None:
        """Offers `spooled` in place of the earlier frame of its kind."""
        with self._lock:
            old = self._frames.get(spooled.header.kind)
            self._frames[spooled.header.kind] = spooled
        if old is not None:
            old.remove()

    def get(self, kind: str, *, version: int) -> SpooledFrame | None:
        """The frame of `kind` if it gives `version`."""
        with self._lock:
            found = self._frames.get(kind)
        return found if found is not None and found.header.round == version else None


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
