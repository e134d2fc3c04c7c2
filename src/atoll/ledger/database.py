"""One connection to the ledger's database: transactions, taking turns, and plain errors.

Knows no table. Every caller gets the connection inside a transaction and under the lock, so calls
are serialised and an exception rolls everything back. After an I/O error of SQLite nothing is read
or written any more: a second sync could report success for bytes that are gone.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from atoll.errors import (
    AtollError,
    DiskFailed,
    StateDamaged,
    StateHeld,
    StorageFull,
    StoreAway,
    StoreError,
    Superseded,
)

log = logging.getLogger(__name__)

# What the drivers raise beside SQLAlchemy's own: sqlite3 reports a number past 64 bits this way,
# and bytes that are no text any more, in a value or in its message about a damaged table.
DRIVER_ERRORS = (SQLAlchemyError, OverflowError, UnicodeDecodeError)

_POSTGRES_DISK_FULL = "53100"
CLOSE_SECONDS = 2.0  # for a call under way; a stop must be over within 10 s
CHECKPOINT_BYTES = 4 << 20  # of write-ahead log; SQLite's own default, 1,000 pages
CHECKPOINT_COMMITS = 64  # at most so many between two, once the log is that long
# Connections to a failed disk, never closed: closing one would sync its files again.
_ABANDONED: list[Connection] = []
# The last three: a page that holds the tables' own names has changed.
_SQLITE_DAMAGED = (
    "malformed",
    "file is not a database",
    "unsupported file format",
    "no such table:",
    "no such column:",
    "no such index:",
)


class Right(Protocol):
    """What allows this process to write; see `epochs`."""

    def check(self, connection: Connection) -> None:
        """Superseded unless the right stands until the transaction's end."""
        ...

    def overtaken(self, connection: Connection) -> StoreError | None:
        """Who has it now, when it is lost."""
        ...


class AtCommit(Protocol):
    """What is done with every writing transaction, inside it."""

    def begin(self, connection: Connection) -> None: ...

    def end(self, connection: Connection) -> None: ...


class Database:
    """The ledger's only connection; `name` is how messages call it and holds no password."""

    def __init__(self, connection: Connection, *, name: str, wal: Path | None = None) -> None:
        self._connection = connection
        self._wal = wal  # the write-ahead log of a SQLite file
        self._checked_bytes = 0  # how long the log was at the last checkpoint
        self._commits = 0  # since then
        self._failed: DiskFailed | None = None
        self._lock = Lock()
        self.name = name
        self.at_commit: AtCommit | None = None
        self.is_sqlite = connection.dialect.name == "sqlite"
        self.identity: str | None = None  # names it among copies; None: the place of its file does
        self._right: Right | None = None
        self._on_close: Callable[[], None] = lambda: None
        self._lost: StoreError | None = None
        self._is_closing = False
        self._listeners: list[Callable[[AtollError], None]] = []

    def guard(self, right: Right, *, on_close: Callable[[], None]) -> None:
        """From here on every writing transaction begins with a check of `right`."""
        self._right, self._on_close = right, on_close

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        """Calls `tell` once, from any thread, when this process may no longer write."""
        self._listeners.append(tell)
        if self._lost is not None:
            tell(self._lost)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that is durable when the block ends and undone when it raises."""
        # IMMEDIATE takes the write lock up front: a transaction never finds out halfway that it
        # may not write.
        with self._transaction("BEGIN IMMEDIATE") as connection:
            if self._right is not None:
                self._right.check(connection)
            if self.at_commit is not None:
                self.at_commit.begin(connection)
            yield connection
            if self.at_commit is not None:
                self.at_commit.end(connection)
        if self._wal is not None:
            with self._lock:
                self._shorten(_size(self._wal))

    def _shorten(self, log_bytes: int) -> None:
        """A checkpoint when the log is long, under the lock; the next transaction begins it anew.

        Its file keeps its length, so that it grew is one sign of a long log, and commits another.
        """
        self._commits += 1
        has_grown = log_bytes > self._checked_bytes
        if log_bytes >= CHECKPOINT_BYTES and (has_grown or self._commits >= CHECKPOINT_COMMITS):
            self._checkpoint()
            self._checked_bytes, self._commits = log_bytes, 0

    def _checkpoint(self) -> None:
        """Moves what is committed into the main file, under the lock.

        Not left to SQLite, which does not tell when the disk fails here. Without room the log just
        grows until there is some. The log is never cut: of a file that is being cut a power cut may
        leave any part, and SQLite takes old pages at its start for new ones.
        """
        self._check_usable()
        try:
            self._connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._connection.commit()  # ends what SQLAlchemy thinks it has begun
        except DRIVER_ERRORS as exc:
            with suppress(SQLAlchemyError):
                self._connection.rollback()
            error = self._noted(translate(exc, name=self.name))
            if not isinstance(error, StorageFull):
                raise error from exc
            log.warning("no room to shorten the ledger's log", extra={"ledger": self.name})

    def _noted(self, error: StoreError) -> StoreError:
        if isinstance(error, DiskFailed):
            self._failed = error
        return error

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
            except Superseded as error:
                self._lose(error)
                raise
            except DRIVER_ERRORS as exc:
                if self._connection.invalidated:
                    raise self._lose(self._loss()) from exc
                raise self._noted(translate(exc, name=self.name)) from exc

    @property
    def is_lost(self) -> bool:
        """Whether this process can never write here again: taken over, cut off or closed."""
        return self._lost is not None or self._connection.closed

    def _lose(self, error: StoreError) -> StoreError:
        if self._lost is None:
            self._lost = error
            for tell in self._listeners:
                tell(error)
        return self._lost

    def _loss(self) -> StoreError:
        """Why the connection is gone: another holder if there is one, else only that it is."""
        if self._right is not None and not self._is_closing:
            try:
                with self._connection.engine.connect() as asking:
                    overtaken = self._right.overtaken(asking)
            except DRIVER_ERRORS:
                overtaken = None
            if overtaken is not None:
                return overtaken
        return _lost(self.name)

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._connection.closed:
            raise StoreError(f"the ledger {self.name} is closed; open it again to use it")
        # SQLAlchemy would connect anew without a word: without its locks, and with what the
        # coordinator remembers perhaps overtaken by another.
        if self._connection.invalidated:
            raise self._lose(self._loss())

    def _is_whole(self) -> bool:
        gone = self._connection.closed or self._connection.invalidated
        return self._failed is None and not gone

    def close(self) -> None:
        """Gives the connection and what it locks back; harmless when repeated.

        Waits for a call under way, but not for a server that answers no more.
        """
        self._on_close()
        self._is_closing = True
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            self._hang_up()
            self._lock.acquire()
        try:
            self._close()
        finally:
            self._lock.release()

    def _hang_up(self) -> None:
        """Ends the call that waits for a server: whether its commit counted, the next start reads.

        SQLite's calls end by themselves.
        """
        if self.is_sqlite or self._connection.invalidated:
            return
        driver: Any = self._connection.connection.driver_connection
        with suppress(OSError), socket.socket(fileno=os.dup(driver.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        try:
            if self._wal is not None and self._is_whole():
                self._checkpoint()
        finally:
            if self._failed is None:
                self._connection.close()
            else:
                _ABANDONED.append(self._connection)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


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
    if "disk I/O error" in said:
        return DiskFailed(
            f"the disk of the ledger {name} answered {said!r}; nothing of this call counts. "
            f"This process stops; check the disk and start it again"
        )
    if "database is locked" in said:
        return StateHeld(
            f"the ledger {name} is held by another process; only one may open it at a time, "
            f"so stop that one first"
        )
    if isinstance(exc, UnicodeDecodeError) or any(phrase in said for phrase in _SQLITE_DAMAGED):
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
    return StoreAway(
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
