"""Where the coordinator can be killed: before and after every statement, commit and file call.

A kill is an exception that no `except Exception` catches. Once it was raised the process is dead:
every further statement or file call of its unwinding is refused too, and files are left as they
are, so that what survives is what a real kill leaves.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from atoll.files import SystemFiles
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.ledger.tables.transaction import Transaction

_READS = ("SELECT", "PRAGMA")


class Crash(BaseException):
    """The coordinator's process is killed here."""


@dataclass(eq=False)
class Seams:
    """Counts the places that one life of the coordinator passes, and kills it at a chosen one."""

    recorded: Callable[[], None] = lambda: None  # after each transaction
    between: Callable[[str], None] = lambda _: None  # lets others speak, where they can
    passed: int = 0
    is_dead: bool = False
    dies_at: float = math.inf  # the number of the seam

    def kill_after(self, places: int) -> None:
        """The process dies at the `places`-th seam from now on."""
        self.dies_at = self.passed + places

    def reach(self, name: str) -> None:
        """The process is here; Crash when this is where it dies."""
        if not self.is_dead:
            self.passed += 1
            self.is_dead = self.passed >= self.dies_at
        if self.is_dead:
            raise Crash(name)


@dataclass
class StatementSeams:
    """A seam before and after each writing statement and before each commit of one.

    Fulfils `connection.Watcher`.
    """

    seams: Seams
    written: Callable[[str], None]  # told of each writing statement
    _is_writing: bool = False

    def before(self, text: str) -> None:
        if text.startswith("BEGIN"):
            self._is_writing = text != "BEGIN"
            if self._is_writing and not self.seams.is_dead:
                self.seams.recorded()  # what the transaction before left
        if self._is_writing and not text.startswith(_READS):
            self.seams.reach(f"before {_short(text)}")
            self.written(text)
        elif self.seams.is_dead:
            raise Crash(text)

    def after(self, text: str) -> None:
        if self._is_writing and not text.startswith((*_READS, "BEGIN")):
            self.seams.reach(f"after {_short(text)}")

    def commit(self) -> None:
        self.seams.reach("before COMMIT")


def _short(statement: str) -> str:
    return " ".join(statement.split()[:3])


class SteppedLedger(Ledger):
    """A ledger with a seam before and after each transaction that writes.

    It is named after the first call in it, and begins only with that, so that who is let in before
    it finds no transaction open.
    """

    def __init__(self, database: Database, seams: Seams) -> None:
        super().__init__(database)
        self._seams = seams

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        began = _Beginning(super().writing(), self._seams)
        with began.stack:
            yield cast(Transaction, began)
        if began.name:
            self._seams.recorded()
            self._seams.reach(f"after {began.name}")
            self._seams.between(f"after {began.name}")


@dataclass
class _Beginning:
    """A transaction that begins with the first call to one of its tables."""

    real: AbstractContextManager[Transaction]
    seams: Seams
    name: str = ""
    stack: ExitStack = field(default_factory=ExitStack)
    begun: Transaction | None = None

    def __getattr__(self, table: str) -> Any:
        return _Calls(self, table)

    def begin(self, name: str) -> Transaction:
        if self.begun is None:
            self.name = name
            self.seams.between(f"before {name}")
            self.seams.reach(f"before {name}")
            self.begun = self.stack.enter_context(self.real)
        return self.begun


@dataclass
class _Calls:
    """One table of a transaction: what is called of it begins the transaction."""

    transaction: _Beginning
    table: str

    def __getattr__(self, method: str) -> Any:
        begun = self.transaction.begin(f"{self.table}.{method}")
        return getattr(getattr(begun, self.table), method)


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
