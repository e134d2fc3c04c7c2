"""One connection to the ledger's database: transactions, taking turns, and plain errors.

Knows no table. Every caller gets the connection inside a transaction and under the lock, so calls
are serialised and an exception rolls everything back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from atoll.errors import StateDamaged, StateHeld, StorageFull, StoreError

# What the drivers raise beside SQLAlchemy's own: sqlite3 reports a number past 64 bits this way.
DRIVER_ERRORS = (SQLAlchemyError, OverflowError)

_POSTGRES_DISK_FULL = "53100"
# The last three: a page that holds the tables' own names has changed.
_SQLITE_DAMAGED = (
    "malformed",
    "file is not a database",
    "unsupported file format",
    "no such table:",
    "no such column:",
    "no such index:",
)


class AtCommit(Protocol):
    """What is done with every writing transaction, inside it."""

    def begin(self, connection: Connection) -> None: ...

    def end(self, connection: Connection) -> None: ...


class Database:
    """The ledger's only connection; `name` is how messages call it and holds no password."""

    def __init__(self, connection: Connection, *, name: str) -> None:
        self._connection = connection
        self._lock = Lock()
        self.name = name
        self.at_commit: AtCommit | None = None
        self.is_sqlite = connection.dialect.name == "sqlite"

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that is durable when the block ends and undone when it raises."""
        # IMMEDIATE takes the write lock up front: a transaction never finds out halfway that it
        # may not write.
        with self._transaction("BEGIN IMMEDIATE") as connection:
            if self.at_commit is not None:
                self.at_commit.begin(connection)
            yield connection
            if self.at_commit is not None:
                self.at_commit.end(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction in which all statements see the same state."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def bare(self) -> Iterator[Connection]:
        """The SQLite connection outside any transaction, as PRAGMA and VACUUM need it."""
        assert self.is_sqlite, self.name
        with self._transaction(None) as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str | None) -> Iterator[Connection]:
        with self._lock:
            self._check_usable()
            try:
                with self._connection.begin():
                    # The SQLite driver runs in autocommit mode, so SQLAlchemy's begin() sends
                    # nothing and its commit() ends what this starts. psycopg begins by itself.
                    if begin is not None and self.is_sqlite:
                        self._connection.exec_driver_sql(begin)
                    yield self._connection
            except DRIVER_ERRORS as exc:
                raise translate(exc, name=self.name) from exc

    def _check_usable(self) -> None:
        if self._connection.closed:
            raise StoreError(f"the ledger {self.name} is closed; open it again to use it")
        # SQLAlchemy would connect anew without a word: without the advisory lock, and with what the
        # coordinator remembers perhaps overtaken by another.
        if self._connection.invalidated:
            raise _lost(self.name)

    def close(self) -> None:
        """Gives the connection and what it locks back; harmless when repeated."""
        with self._lock:
            self._connection.close()


def translate(exc: Exception, *, name: str) -> StoreError:
    """The error Atoll raises for what a database driver reported."""
    said = detail(exc)
    if isinstance(exc, DBAPIError) and exc.connection_invalidated:
        return _lost(name)
    if "database or disk is full" in said or _sqlstate(exc) == _POSTGRES_DISK_FULL:
        return StorageFull(
            f"the ledger {name} found no room on its disk and recorded nothing of this call; "
            f"free some space and send it again"
        )
    if "database is locked" in said:
        return StateHeld(
            f"the ledger {name} is held by another process; only one may open it at a time, "
            f"so stop that one first"
        )
    if any(phrase in said for phrase in _SQLITE_DAMAGED):
        return StateDamaged(
            f"the ledger {name} cannot be read as a database ({said}); `atoll repair` shows "
            f"what of it can be kept, or restore it from a copy"
        )
    if isinstance(exc, IntegrityError):
        return StoreError(
            f"the ledger {name} refused a row that breaks its schema ({said}); "
            f"nothing of this call was recorded"
        )
    return StoreError(
        f"the ledger {name} answered {said!r} and recorded nothing of this call; "
        f"see that its disk or server works, then start again"
    )


def _lost(name: str) -> StoreError:
    return StoreError(
        f"the connection to the ledger {name} was lost, and with it the right to write; "
        f"restart this process: it reads there whether the last change was recorded"
    )


def detail(exc: Exception) -> str:
    """The driver's own first line, without SQLAlchemy's copy of statement and values."""
    cause = exc.orig if isinstance(exc, DBAPIError) and exc.orig is not None else exc
    return str(cause).strip().partition("\n")[0]


def _sqlstate(exc: Exception) -> str | None:
    cause = exc.orig if isinstance(exc, DBAPIError) else None
    return getattr(cause, "sqlstate", None)
