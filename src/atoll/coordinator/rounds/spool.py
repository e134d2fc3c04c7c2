"""Published frames on disk, ready to be streamed: a download never holds a whole payload in memory.

Spool files can be computed again from the ledger, so they are neither synced nor kept over a
restart. A file that is being read outlives its removal until the last reader closes it.
"""

import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from atoll import files as filesystem
from atoll.codecs.base import Format
from atoll.errors import StateUnsafe, StoreError
from atoll.layout import Layout, Span, byte_view
from atoll.wire import frame
from atoll.wire.header import KINDS, FrameHeader

_OWN_NAME = re.compile(rf"({'|'.join(KINDS)})-[0-9]+-[0-9]+\.frame")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class SpooledFrame:
    """One complete frame; positioned reads from any thread."""

    def __init__(
        self, path: Path, fd: int, header: FrameHeader, nbytes: int, *, sha256: str | None = None
    ) -> None:
        self.path = path
        self.sha256 = sha256  # of all its bytes, where they were hashed
        self.header = header
        self.nbytes = nbytes
        self.tag = f"{header.kind}-{header.round}-{header.result_digest}"
        self._fd = fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`."""
        return os.pread(self._fd, nbytes, offset)

    def leads(self, round_number: int, have_digest: str) -> bool:
        """Whether it brings an island, whose part of the model has `have_digest`, to that round."""
        header = self.header
        return header.round == round_number and header.base_digest in (None, have_digest)

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass
class FrameSpooler:
    """Fills one spool file tile by tile, in any order and from any thread.

    A context: when it is left without `finish`, the file is taken away again. By then no other
    thread may write on: the descriptor may be somebody else's.
    """

    path: Path
    codec: Format
    header: FrameHeader  # result_digest is a stand-in of the right length until `finish`

    def __post_init__(self) -> None:
        self._payload_offset = len(frame.preamble(self.header, digest_checked=True))
        with filesystem.naming("open", self.path):
            self._fd = os.open(self.path, _FLAGS, 0o600)
        # Room for all of it before the first byte: an outer step must not find out halfway.
        nbytes = frame.frame_bytes(self.header)
        try:
            filesystem.reserve(self._fd, nbytes, path=self.path)
        except StoreError:
            self._discard()
            raise

    def __enter__(self) -> "FrameSpooler":
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

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
        trailer = frame.digest_checked_trailer(preamble)
        self._write(memoryview(trailer), nbytes - len(trailer))
        return self._finished(header, nbytes)

    def stream(self, header: FrameHeader, pieces: Iterable[bytes]) -> SpooledFrame:
        """The frame is what `pieces` give, from its first byte to its last; it is hashed."""
        offset, passed = 0, frame.Hashing()
        for piece in pieces:
            passed.write(memoryview(piece))
            self._write(memoryview(piece), offset)
            offset += len(piece)
        nbytes = frame.frame_bytes(header)
        assert offset == nbytes, (offset, nbytes)
        return self._finished(header, nbytes, sha256=passed.digest())

    def _finished(
        self, header: FrameHeader, nbytes: int, *, sha256: str | None = None
    ) -> SpooledFrame:
        fd, self._fd = self._fd, -1
        return SpooledFrame(self.path, fd, header, nbytes, sha256=sha256)

    def _write(self, data: memoryview, offset: int) -> None:
        assert self._fd >= 0, "this spooler was left"
        with filesystem.naming("write", self.path):
            while data:
                written = os.pwrite(self._fd, data, offset)
                data, offset = data[written:], offset + written

    def _discard(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
            self.path.unlink(missing_ok=True)


class Spool:
    """The frames that islands may download now: the newest of each kind and part of the model.

    Earlier updates stay beside the newest as long as all of them together are below a limit, so
    that an island which is some versions behind can follow them one by one.

    Thread-safe: the closing thread puts, request threads get.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if directory.is_symlink():
            raise StateUnsafe(
                f"{str(directory)!r} is a symbolic link; what it leads to is not this program's to "
                f"clear, so remove the link"
            )
        for leftover in directory.iterdir():
            if _OWN_NAME.fullmatch(leftover.name):
                leftover.unlink()
        self._lock = threading.Lock()
        # By kind and layout, newest first.
        self._frames: dict[tuple[str, str], list[SpooledFrame]] = {}
        self._serial = 0

    def spooler(self, codec: Format, header: FrameHeader) -> FrameSpooler:
        """A new file to fill."""
        with self._lock:
            self._serial += 1
            path = self._directory / f"{header.kind}-{header.round}-{self._serial}.frame"
        return FrameSpooler(path, codec, header)

    def put(self, spooled: SpooledFrame, *, keep_below: int = 0) -> None:
        """Offers `spooled` in place of the earlier frames of its kind and part of the model.

        Those that lead up to it stay while they and it have fewer than `keep_below` bytes together.
        """
        key = spooled.header.kind, spooled.header.layout_digest
        with self._lock:
            kept, old = [spooled], self._frames.get(key, [])
            total, wanted = spooled.nbytes, spooled.header.base_digest
            for earlier in old:
                total += earlier.nbytes
                if total >= keep_below or wanted != earlier.header.result_digest:
                    break
                kept.append(earlier)
                wanted = earlier.header.base_digest
            self._frames[key] = kept
        for earlier in old[len(kept) - 1 :]:
            earlier.path.unlink(missing_ok=True)  # readers go on until they are done

    def leading(self, round_number: int, have_digest: str) -> SpooledFrame | None:
        """The smallest frame that brings an island with `have_digest` to that round."""
        with self._lock:
            offered = [f for frames in self._frames.values() for f in frames]
        found = [f for f in offered if f.leads(round_number, have_digest)]
        return min(found, key=lambda spooled: spooled.nbytes, default=None)

    def get(self, kind: str, layout: Layout) -> SpooledFrame | None:
        """The newest frame of `kind` over `layout`, a fragment's or the run's."""
        with self._lock:
            return next(iter(self._frames.get((kind, layout.digest), ())), None)
