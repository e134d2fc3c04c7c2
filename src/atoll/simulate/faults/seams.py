"""Where the coordinator can be killed: before and after every statement, commit and file call.

A kill is an exception that no `except Exception` catches. Once it was raised the process is dead:
every further statement or file call of its unwinding is refused too, and files are left as they
are, so that what survives is what a real kill leaves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, event

from atoll.files import SystemFiles
from atoll.ledger.base import Ledger

_READS = ("SELECT", "PRAGMA")
_WRITING_CALLS = frozenset(
    {
        "create_run",
        "add_manifest",
        "add_datasets",
        "register",
        "deregister",
        "set_control",
        "begin",
        "extend",
        "accept",
        "expire",
        "freeze",
        "publish",
        "add_snapshot",
        "drop_snapshots",
    }
)


class Crash(BaseException):
    """The coordinator's process is killed here."""


class Seams:
    """Counts the places that one life of the coordinator passes, and kills it at a chosen one."""

    def __init__(self) -> None:
        self.passed = 0
        self.is_dead = False
        self.last = ""
        self._left: int | None = None
        self.recorded: Callable[[], None] = lambda: None  # after each transaction
        self.between: Callable[[str], None] = lambda _: None  # lets others speak, where they can

    def kill_after(self, places: int) -> None:
        """The process dies at the `places`-th seam from now on."""
        self._left = places

    def spare(self) -> None:
        """The process is not killed any more."""
        self._left = None

    def reach(self, name: str) -> None:
        """The process is here; Crash when this is where it dies."""
        if self.is_dead:
            raise Crash(name)
        self.passed += 1
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._left = None
                self.is_dead = True
                self.last = name
                raise Crash(name)


def watch_statements(connection: Connection, seams: Seams) -> None:
    """A seam before and after each writing statement and before each commit of one."""
    is_writing = False

    def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal is_writing
        if statement.startswith("BEGIN"):
            is_writing = statement != "BEGIN"
            if is_writing and not seams.is_dead:
                seams.recorded()  # what the transaction before left, however many one call makes
        if is_writing and not statement.startswith(_READS):
            seams.reach(f"before {_short(statement)}")
        elif seams.is_dead:
            raise Crash(statement)

    def after(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if is_writing and not statement.startswith((*_READS, "BEGIN")):
            seams.reach(f"after {_short(statement)}")

    def commit(_c: Any) -> None:
        if is_writing:
            seams.reach("before COMMIT")

    event.listen(connection, "before_cursor_execute", before)
    event.listen(connection, "after_cursor_execute", after)
    event.listen(connection, "commit", commit)


def _short(statement: str) -> str:
    return " ".join(statement.split()[:3])


class _SteppedLedger:
    """A ledger with a seam before and after each call that writes."""

    def __init__(self, ledger: Ledger, seams: Seams) -> None:
        self._ledger = ledger
        self._seams = seams

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)
        if name not in _WRITING_CALLS:
            return method

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._seams.between(f"before {name}")
            self._seams.reach(f"before {name}")
            result = method(*args, **kwargs)
            self._seams.recorded()
            self._seams.reach(f"after {name}")
            self._seams.between(f"after {name}")
            return result

        return stepped


def stepped(ledger: Ledger, seams: Seams) -> Ledger:
    """`ledger`, with a seam around each call that writes."""
    return cast(Ledger, _SteppedLedger(ledger, seams))


class SteppedFiles(SystemFiles):
    """The file calls of the blob store; a dead process changes no file any more."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams

    def create(self, path: Path) -> int:
        self._seams.reach("create file")
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._seams.reach("write file")
        return super().write(fd, data)

    def sync_file(self, fd: int) -> None:
        self._seams.reach("before sync file")
        super().sync_file(fd)

    def sync_directory(self, path: Path) -> None:
        self._seams.reach("before sync directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._seams.reach("before rename")
        super().rename(source, target)
        self._seams.reach("after rename")

    def remove(self, path: Path) -> None:
        if self._seams.is_dead:
            return  # unwinding: a dead process cleans nothing up
        self._seams.reach("before remove")
        super().remove(path)
