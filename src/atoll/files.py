"""Durable files, the one place: how bytes and names get to a disk, and how its errors are named.

Below everything that keeps state; knows nothing of what is kept. Functions here raise StorageFull
(Exhausted), StoreError or DiskFailed and never a bare OSError. `SystemFiles` is the seam of the
blob store: crash tests derive from it, and record or refuse calls.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atoll import open_files
from atoll.errors import DiskFailed, StorageFull, StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_STOPS = "nothing was recorded. This process stops; check the disk and start it again"


class Identity(NamedTuple):
    """What changes whenever a file is replaced or written to."""

    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int


class SystemFiles:
    """The calls that must happen in the right order for a blob to survive a crash.

    Without state, so any thread may use it. OSErrors go through: `naming` and `syncing` name them.
    """

    def create(self, path: Path) -> int:
        """A descriptor of a new file at `path`; FileExistsError when there is one."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """A descriptor for reading; a symbolic link is refused."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Takes `nbytes` of room, where the filesystem can; the file may grow to that size."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as exc:
            if exc.errno not in _CANNOT_RESERVE:
                raise

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Lets the disk begin with a finished range; promises nothing and waits for nothing."""
        # On Linux DONTNEED first starts writing dirty pages, and drops only clean ones, so what was
        # just written stays cached. Measured on 100 MB in 1 MiB writes: the commit's sync 52 ->
        # 11 ms, write and commit together 212 -> 161 ms, reading back 12 ms either way.
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def identity(self, fd: int) -> Identity:
        stat = os.fstat(fd)
        return Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def sync_file(self, fd: int) -> None:
        """Returns once the file's bytes and size are on the disk."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Returns once the names in the directory are on the disk."""
        # Before anything is synced: to have no file left says nothing about the disk.
        with open_files.scarce("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: Path) -> None:
        """Makes one directory; harmless when it exists."""
        # Not exist_ok of makedirs: one level only, so that the caller syncs each parent it changed.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; FileExistsError when there is one at `target`."""
        os.link(source, target, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Removes a file; harmless when it is absent."""
        path.unlink(missing_ok=True)


SYSTEM = SystemFiles()


def write_whole(path: Path, data: bytes, *, way_out: str | None = None) -> None:
    """Puts `data` at `path`, whole or not at all, readable for its owner alone.

    When it returns, bytes and name are on the disk; until then an older file there stays as it was.
    """
    part = part_of(path)
    with naming("write", path, way_out=way_out):
        # Made anew: the mode is ours whatever an earlier life left.
        SYSTEM.remove(part)
        with os.fdopen(SYSTEM.create(part), "wb") as file:
            file.write(data)
    put_in_place(part, path, way_out=way_out)


def create_whole(path: Path, data: bytes) -> bool:
    """Puts `data` at `path`, as `write_whole` does; False, and nothing is changed, if it exists.

    Of several callers at once exactly one gets True.
    """
    # A name of its own: another that creates the same file writes beside this one.
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    with naming("write", path):
        SYSTEM.remove(part)  # of an earlier life
        with os.fdopen(SYSTEM.create(part), "wb") as file:
            file.write(data)
    try:
        sync(part)
        created = link_new(part, path)
    finally:
        SYSTEM.remove(part)
    sync(path.parent)
    return created


def link_new(part: Path, path: Path) -> bool:
    """Gives a finished, synced file its name `path` too; False when there is another file."""
    with naming("create", path):
        try:
            SYSTEM.link(part, path)
        except FileExistsError:
            return False
    return True


def part_of(path: Path) -> Path:
    """Where a file is written before it gets its name; what a crash leaves there means nothing."""
    return path.with_name(path.name + ".part")


def put_in_place(part: Path, path: Path, *, way_out: str | None = None) -> None:
    """Gives a finished file its name, durably: no crash leaves a name without its bytes."""
    sync(part, way_out=way_out)
    with naming("rename to", path, way_out=way_out):
        SYSTEM.rename(part, path)
    sync(path.parent, way_out=way_out)


def sync(path: Path, *, way_out: str | None = None) -> None:
    """Returns once a file's bytes, or the names in a directory, are on the disk; else DiskFailed.

    The file may have been written by somebody else and be closed: Linux tells a new descriptor of a
    lost write that nobody has been told of yet.
    """
    with naming("open", path, way_out=way_out):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # what a link leads to
    try:
        with syncing(path, way_out=way_out):
            os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, *, files: SystemFiles = SYSTEM) -> None:
    """Makes `path` and what is missing above it; when it returns, their names are on the disk."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    for directory in reversed(missing):
        with naming("make", directory):
            files.make_directory(directory)
    changed = [directory.parent for directory in missing]
    # Also of one that was there: an earlier life may have made it and ended before this. Where the
    # directory above may not be read, it was made by somebody else.
    if not changed and os.access(path.parent, os.R_OK):
        changed = [path.parent]
    for parent in changed:
        with syncing(parent):
            files.sync_directory(parent)


def reserve(fd: int, nbytes: int, *, path: Path, files: SystemFiles = SYSTEM) -> None:
    """Takes room for a whole file before its first byte; StorageFull when there is not as much."""
    with naming(f"reserve {nbytes} bytes for", path):
        files.reserve(fd, nbytes)


@contextlib.contextmanager
def naming(action: str, path: Path, *, way_out: str | None = None) -> Iterator[None]:
    """Turns an OSError into StorageFull or StoreError with the path and the system's reason."""
    try:
        with open_files.scarce(action, path):
            yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise StorageFull(
                f"no room to {action} {str(path)!r} ({exc.strerror}); "
                f"{way_out or 'free some on that disk and send it again'}"
            ) from exc
        reason = f"cannot {action} {str(path)!r}: {exc.strerror or exc}"
        raise StoreError(f"{reason}; {way_out}" if way_out else reason) from exc


@contextlib.contextmanager
def syncing(path: Path, *, way_out: str | None = None) -> Iterator[None]:
    """Turns the OSError of a sync into DiskFailed, whatever its number.

    Not StorageFull and never retried: after one failed sync the kernel may have dropped the dirty
    pages, and a second call would report success for bytes that are gone.
    """
    try:
        yield
    except OSError as exc:
        raise DiskFailed(
            f"the disk did not confirm {str(path)!r}: {exc.strerror or exc}; {way_out or _STOPS}"
        ) from exc


def read_into(fd: int, offset: int, buffer: memoryview, *, path: Path) -> None:
    """Fills `buffer` from `offset` of the file; StoreError when it ends before."""
    view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    done = 0
    while done < len(view):
        with naming("read", path):
            count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise StoreError(
                f"{str(path)!r} ends at byte {offset + done}, "
                f"but {len(view)} bytes from {offset} were asked for"
            )
        done += count
