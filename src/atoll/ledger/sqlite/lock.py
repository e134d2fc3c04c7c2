"""Who holds a state directory: one process at a time, named.

A lock of the operating system, so it ends with its holder however that ends. The file stays behind;
only the lock on it means anything.
"""

import fcntl
import json
import os
import socket
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from atoll import own_directory
from atoll.clock import SystemClock
from atoll.errors import DiskFailed, StateHeld, StoreError

FILE_NAME = "coordinator.lock"
_INFO_BYTES = 4096


class Lock:
    """A held directory; `close` gives it back. Any thread may `check` it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def check(self) -> None:
        """DiskFailed when the directory's path no longer leads here: nobody keeps others out there.

        Whoever writes by that path would write into what another process may hold by now.
        """
        if self._descriptor is not None and not _leads_to(self.path, self._descriptor):
            raise DiskFailed(
                f"the state directory {str(self.path.parent)!r} was moved, deleted or replaced "
                f"while this process held it ({self.path.name} is another one or none); this "
                f"process stops; put the directory back and start it again"
            )

    def close(self) -> None:
        """Releases the directory; harmless when repeated."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            # Unlock, not only close: a forked child may still have the same open file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def hold(directory: Path, *, file_name: str = FILE_NAME, who: str = "coordinator") -> Lock:
    """Holds `directory` for this process, or raises StateHeld at once, naming who does.

    StateUnsafe for one that others can write to, or that holds a link.
    """
    own_directory.check(directory)
    path, name = directory / file_name, f"the state directory {str(directory)!r}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        rule = "the state directory must exist and be writable"
        raise StoreError(f"{str(path)!r} cannot be opened ({exc.strerror}); {rule}") from exc
    with ExitStack() as refused:
        refused.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _leads_to(path, descriptor):
                moved = "was moved away or replaced while it was being opened"
                raise StateHeld(f"{name} {moved}; see by whom, and start again")
            wall = SystemClock().wall()
            info = {"pid": os.getpid(), "started": wall, "host": socket.gethostname()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(info).encode(), 0)
        except BlockingIOError as exc:
            rule = f"only one {who} may use it, so stop that one first"
            raise StateHeld(f"{name} is held by {_holder(descriptor)}; {rule}") from exc
        except OSError as exc:
            rule = "the state directory must be on a writable file system with locks"
            raise StoreError(f"{str(path)!r} cannot be locked ({exc.strerror}); {rule}") from exc
        refused.pop_all()
    return Lock(path, descriptor)


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    try:
        info = json.loads(os.pread(descriptor, _INFO_BYTES, 0))
        since = datetime.fromtimestamp(float(info["started"]), tz=UTC)
        return f"process {int(info['pid'])} on {info['host']!r} since {since:%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, KeyError, TypeError):
        # It has the lock and has not written its name yet.
        return "a process that has just started"
