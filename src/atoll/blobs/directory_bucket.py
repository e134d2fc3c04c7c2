"""A bucket as files of one directory, below the names that their keys are.

    root/.drafts/<draft>     while being written; no key starts with a dot
    root/<key>               once stored

An object appears whole or not at all and survives a crash once the call returned. Several processes
may share a root. A draft that a crash leaves behind is never read; its name tells the process.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import bucket as buckets
from atoll.blobs.base import BlobRef
from atoll.blobs.bucket import PIECE_BYTES, Tag
from atoll.blobs.drafts import Drafts, FileDraft
from atoll.clock import Clock
from atoll.errors import ObjectMissing, ObjectRefused
from atoll.files import Identity

_DRAFTS = ".drafts"
# Without waiting: whoever may write here could put a pipe where an object belongs, and opening one
# takes until somebody writes to it.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO)


class DirectoryBucket:
    """Objects below `root`, which is made when it does not exist; several threads may share it."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root.absolute()
        self._clock = clock
        self._files = filesystem.SYSTEM
        filesystem.make_directories(self._root / _DRAFTS)
        self._drafts = Drafts(self._files, self._root / _DRAFTS, will_sync=True)

    def look(self, key: str, *, deadline: float) -> Tag | None:
        path = self._path(key)
        self._check_time(path, deadline)
        return self._tag(path)

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        path = self._path(key)
        buckets.check_range(key, tag, start, stop)
        fd = self._opened(path)
        try:
            buffer = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
            for begin in range(start, stop, PIECE_BYTES):
                self._check_time(path, deadline)
                piece = buffer[: min(PIECE_BYTES, stop - begin)]
                # Before, or a file that was cut would read as one of the disk's errors; and after.
                self._check_same(fd, tag, path)
                filesystem.read_into(fd, begin, piece, path=path)
                self._check_same(fd, tag, path)
                yield piece
        finally:
            self._files.close(fd)

    def put(self, key: str, source: bytes | Path) -> Tag:
        path = self._path(key)
        draft = self._filled(source)
        with draft.dropped_on_error():
            filesystem.make_directories(path.parent)
            filesystem.put_in_place(draft.path, path)
            draft.close()
        return buckets.confirmed(str(path), self._tag(path), nbytes=draft.nbytes)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        draft = self._filled(data)
        try:
            filesystem.make_directories(path.parent)
            filesystem.sync(draft.path)
            created = filesystem.link_new(draft.path, path)
        finally:
            draft.drop()
        # Also where it was there: whoever made it may not have come this far.
        filesystem.sync(path.parent)
        return created

    def remove(self, key: str) -> None:
        path = self._path(key)
        with filesystem.naming("remove", path):
            self._files.remove(path)

    def keys(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix)
        for where, _, names in os.walk(folder):
            found = (str((Path(where) / name).relative_to(self._root)) for name in names)
            yield from filter(buckets.is_key, found)  # others are not of this bucket's making

    def _path(self, key: str) -> Path:
        buckets.check_key(key)
        return self._root / key

    def _tag(self, path: Path) -> Tag | None:
        try:
            fd = self._opened(path)
        except ObjectMissing:
            return None
        try:
            with filesystem.naming("look at", path):
                identity = self._files.identity(fd)
        finally:
            self._files.close(fd)
        return Tag(identity.nbytes, _entity(identity), identity.modified_ns / 1e9)

    def _opened(self, path: Path) -> int:
        """A plain file to read; what else stands there is no object, and its writer's affair."""
        where = f"object {str(path)!r}"
        with filesystem.naming("open", path):
            try:
                fd = os.open(path, _OPEN)
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise buckets.missing(where) from exc
            except OSError as exc:
                if exc.errno in _NOT_OURS:
                    raise _refused(where, exc.strerror) from exc
                raise
            mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        self._files.close(fd)
        raise buckets.missing(where) if stat.S_ISDIR(mode) else _refused(where, "no plain file")

    def _filled(self, source: bytes | Path) -> FileDraft:
        nbytes = len(source) if isinstance(source, bytes) else _size(source)
        draft = self._drafts.new(_not_here, expect_bytes=nbytes)
        with draft.dropped_on_error():
            for piece in _pieces_of(source):
                draft.write(piece)
            draft.finish()
        return draft

    def _check_same(self, fd: int, tag: Tag, path: Path) -> None:
        with filesystem.naming("look at", path):
            if _entity(self._files.identity(fd)) != tag.entity:
                raise buckets.changed(f"object {str(path)!r}")

    def _check_time(self, path: Path, deadline: float) -> None:
        if self._clock.now() >= deadline:
            raise buckets.late(f"object {str(path)!r}")


def _refused(where: str, why: str | None) -> ObjectRefused:
    return ObjectRefused(f"{where} cannot be read ({why}); its writer must put a plain file there")


def _entity(identity: Identity) -> str:
    # Not the time of change: it also moves when a second name is made or taken away.
    return f"{identity.inode:x}-{identity.nbytes:x}-{identity.modified_ns:x}"


def _size(path: Path) -> int:
    with filesystem.naming("read", path):
        return path.stat().st_size


def _pieces_of(source: bytes | Path) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with filesystem.naming("read", source), source.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _not_here(draft: FileDraft) -> BlobRef:
    raise AssertionError(f"{draft.path} gets its name from the bucket")
