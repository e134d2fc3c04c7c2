"""A window's objects on this rank's disk: reserved first, written as they come, read by position.

    <uid>.record   what was pinned: the statement as it was read, and the tag of its object
    <uid>.part     an object under way, and behind it, in 8 bytes, how much of it is there
    <sha256>       a finished object

A process that is started again finds all three and downloads only the rest. Nothing is synced:
whatever is found is checked again from its first byte before it counts, and what proves wrong is
downloaded anew. One process uses a directory at a time, one thread a part.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import canonical
from atoll import files as filesystem
from atoll.blobs.bucket import PIECE_BYTES, Tag
from atoll.blobs.drafts import FileReader, hash_file
from atoll.errors import FrameError, StoreError
from atoll.files import SystemFiles
from atoll.gather.statement import MAX_BYTES
from atoll.wire import schema

_MARK_BYTES = 8
_READ_BYTES = 16 << 10  # of what is there, at a time: many peers are read at once
_RECORD_BYTES = 4 * MAX_BYTES
_OF = "spool record"


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer's download is pinned to."""

    document: bytes  # the signed statement, as it was read
    tag: Tag  # of the object


class Spool:
    """The objects of one window. Safe to share between threads; each part is one thread's."""

    def __init__(self, directory: Path, *, files: SystemFiles = filesystem.SYSTEM) -> None:
        self._directory = directory
        self._files = files
        with filesystem.naming("make", directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    # What a download is pinned to

    def keep(self, uid: str, record: Record) -> None:
        """Pins a peer's statement and object; a record that is there is replaced, never torn."""
        tag = record.tag
        plain = {
            "document": record.document.decode("ascii"),
            "entity": tag.entity,
            "modified": tag.modified,
            "nbytes": tag.nbytes,
        }
        path = self._directory / f"{uid}.record"
        draft = path.with_suffix(".record-draft")
        with filesystem.naming("write", draft):
            draft.write_text(canonical.dumps(plain), "ascii")
            self._files.rename(draft, path)

    def record(self, uid: str) -> Record | None:
        """What an earlier life pinned; None where there is none, or none that can be read."""
        path = self._directory / f"{uid}.record"
        try:
            with path.open("rb") as file:
                return _record(file.read(_RECORD_BYTES + 1))
        except (OSError, FrameError, KeyError, UnicodeError):
            return None

    def forget(self, uid: str) -> None:
        """Drops what is pinned and under way for a peer."""
        for suffix in ("record", "part"):
            self._remove(self._directory / f"{uid}.{suffix}")

    # Objects under way

    def draft(self, uid: str, nbytes: int) -> "Part":
        """The object that an earlier call left off, or an empty one with all its room reserved.

        StorageFull when there is not as much room; nothing is left behind then.
        """
        path = self._directory / f"{uid}.part"
        with filesystem.naming("open", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            offset = 0
            if os.fstat(fd).st_size == nbytes + _MARK_BYTES:
                offset = int.from_bytes(os.pread(fd, _MARK_BYTES, nbytes), "big")
            if not 0 < offset <= nbytes:
                offset = 0
                with filesystem.naming("write", path):
                    self._files.truncate(fd, 0)
                filesystem.reserve(fd, nbytes + _MARK_BYTES, path=path, files=self._files)
                with filesystem.naming("write", path):
                    # Also where nothing can be reserved; and a mark that says 0.
                    self._files.truncate(fd, nbytes + _MARK_BYTES)
        except BaseException:
            self._files.close(fd)
            self._remove(path)
            raise
        return Part(self, fd, path, nbytes=nbytes, offset=offset)

    def finish(self, part: "Part", sha256: str) -> None:
        """Gives a whole object its name."""
        assert part.offset == part.nbytes, (part.offset, part.nbytes)
        with filesystem.naming("finish", part.path):
            self._files.truncate(part.fd, part.nbytes)
            self._files.rename(part.path, self._directory / sha256)
        part.close()

    # Finished objects

    def has(self, sha256: str) -> bool:
        """Whether a finished object has that name; whether its bytes do is for who reads it."""
        return (self._directory / sha256).is_file()

    def path(self, sha256: str) -> Path:
        """Where a finished object is."""
        return self._directory / sha256

    def open(self, sha256: str) -> FileReader:
        """Reads a finished object by position."""
        path = self.path(sha256)
        with filesystem.naming("open", path):
            fd = self._files.open(path)
            nbytes = os.fstat(fd).st_size
        return FileReader(self._files, fd, path=path, nbytes=nbytes)

    def read(self, sha256: str, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)` of a finished object."""
        with self.open(sha256) as reader:
            return reader.read(start, stop - start)

    def drop_if_damaged(self, sha256: str) -> None:
        """Removes a finished object whose bytes no longer have its name.

        One whose bytes do is another peer's where it is not this one's, and stays.
        """
        path = self._directory / sha256
        with filesystem.naming("open", path):
            fd = self._files.open(path)
        try:
            found = hash_file(fd, os.fstat(fd).st_size, path=path)
        finally:
            self._files.close(fd)
        if found != sha256:
            self._remove(path)

    def close_file(self, fd: int) -> None:
        """Ends a part's descriptor."""
        self._files.close(fd)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._files.remove(path)


class Part:
    """An object under way; closing it keeps what is there for the next call."""

    def __init__(self, spool: Spool, fd: int, path: Path, *, nbytes: int, offset: int) -> None:
        self._spool = spool
        self.fd = fd
        self.path = path
        self.nbytes = nbytes
        self.offset = offset  # so much is there

    def write(self, piece: memoryview) -> None:
        """Appends; the mark moves once the bytes are written."""
        if self.offset + len(piece) > self.nbytes:
            raise StoreError(
                f"{str(self.path)!r} has room for {self.nbytes} bytes; {len(piece)} more than "
                f"{self.offset} do not fit"
            )
        with filesystem.naming("write", self.path):
            _write_all(self.fd, piece, self.offset)
            self.offset += len(piece)
            _write_all(self.fd, memoryview(self.offset.to_bytes(_MARK_BYTES, "big")), self.nbytes)

    def written(self) -> Iterator[memoryview]:
        """What is there, in pieces; each is good until the next one."""
        buffer = memoryview(bytearray(min(_READ_BYTES, max(1, self.offset))))
        for start in range(0, self.offset, len(buffer)):
            piece = buffer[: min(len(buffer), self.offset - start)]
            filesystem.read_into(self.fd, start, piece, path=self.path)
            yield piece

    def close(self) -> None:
        """Harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._spool.close_file(fd)

    def __enter__(self) -> "Part":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SpoolSlices:
    """Accepted payloads in a spool, read by uid; fulfils `SliceSource`. `close` it at the end."""

    def __init__(self, spool: Spool, places: Mapping[str, tuple[str, int]]) -> None:
        """`places`: the sha256 of each uid's object, and where the payload begins in it."""
        self._spool = spool
        self._places = dict(places)
        self._readers: dict[str, FileReader] = {}

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload, counted from its first chunk."""
        return self._reader(uid).read(self._places[uid][1] + start, stop - start)

    def preamble(self, uid: str) -> bytes:
        """What stands in an object before its payload."""
        sha256, begins = self._places[uid]
        return self._spool.read(sha256, 0, begins)

    def pieces(self, uid: str) -> Iterator[memoryview]:
        """A whole object; each piece is good until the next one."""
        reader = self._reader(uid)
        buffer = memoryview(bytearray(min(PIECE_BYTES, reader.nbytes)))
        for start in range(0, reader.nbytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, reader.nbytes - start)]
            reader.read_into(start, piece)
            yield piece

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, uid: str) -> FileReader:
        if uid not in self._places:
            raise StoreError(f"the payload of {uid!r} is not in this rank's spool; ask its holder")
        if uid not in self._readers:
            self._readers[uid] = self._spool.open(self._places[uid][0])
        return self._readers[uid]

    def __enter__(self) -> "SpoolSlices":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _record(data: bytes) -> Record:
    if len(data) > _RECORD_BYTES:
        raise FrameError(f"{_OF} has more than {_RECORD_BYTES} bytes")
    table: dict[str, Any] = schema.object_of(data, of=_OF)
    schema.keys(table, known=("document", "entity", "modified", "nbytes"), of=_OF)
    schema.TEXT.check("document", table["document"], of=_OF)
    schema.TEXT.check("entity", table["entity"], of=_OF)
    schema.WHOLE.check("nbytes", table["nbytes"], of=_OF)
    if table["modified"] is not None:
        schema.REAL.check("modified", table["modified"], of=_OF)
    tag = Tag(table["nbytes"], table["entity"], table["modified"])
    return Record(table["document"].encode("ascii"), tag)
