"""A ledger's database: transactions, taking turns, and plain errors.

Knows no table. Every caller gets the connection inside a transaction and under the lock, so calls
are serialised and an exception rolls everything back. After an I/O error of SQLite nothing is read
or written any more: a second sync could report success for bytes that are gone. What SQLite and
PostgreSQL do differently is in their sub-packages.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident

from atoll import errors, open_files
from atoll.errors import AtollError, DiskFailed, StoreError, Superseded
from atoll.ledger.connection import DRIVER_ERRORS, Connection, DriverError, Mode
from atoll.ledger.records import LedgerDamage

_POSTGRES_DISK_FULL = "53100"
_POSTGRES_OUT_OF_MEMORY = "53200"
_CANNOT_OPEN = "unable to open database file"
CLOSE_SECONDS = 2.0  # for a call under way; a stop must be over within 10 s
# Connections to a failed disk, never closed: closing one would sync its files again.
_ABANDONED: list[Connection] = []
REPAIR = "`atoll repair` shows what of it can be kept, or restore it from a copy"
# The last three: a page that holds the tables' own names has changed.
_SQLITE_DAMAGED = (
    "malformed",
    "file is not a database",
    "unsupported file format",
    "no such table:",
    "no such column:",
    "no such index:",
)


class Database:
    """The ledger's only connection; `name` is how messages call it and holds no password.

    Safe to share: transactions of several threads take turns under one lock.
    """

    def __init__(self, connection: Connection, *, name: str) -> None:
        self.connection = connection
        self.name = name
        self._lock = Lock()
        self._owner: int | None = None  # the thread whose transaction is open
        self._failed: DiskFailed | None = None
        self._lost: StoreError | None = None
        self.is_in_use = False  # whether its files were all opened once
        self._listeners: list[Callable[[AtollError], None]] = []

    # What the engines do each in their own way

    def _begin(self, mode: Mode) -> None:
        """Begins a transaction, under the lock."""
        raise NotImplementedError

    def has_table(self, name: str) -> bool:
        """Whether there is such a table; inside a transaction."""
        raise NotImplementedError

    def _end(self) -> None:
        """The last thing inside every writing transaction."""

    def _committed(self) -> None:
        """After every writing transaction, under the lock."""

    def _why_lost(self) -> StoreError:
        """Why the connection is gone, as far as can be known."""
        return lost(self.name)

    def made(self) -> None:
        """Called in the transaction that has just made the tables."""

    def changed(self) -> None:
        """Called in the transaction that has just changed the tables themselves."""

    def migrated(self) -> None:
        """Called once the tables are there, outside any transaction."""

    def check_held(self) -> None:
        """Superseded when another process has taken the ledger over."""

    def damage(self) -> list[LedgerDamage]:
        """What is no longer as it was written, as far as the engine leaves that to us."""
        return []

    @property
    def identity(self) -> str | None:
        """A name that tells this database from its copies; None for a file, which has a path."""
        return None

    # Transactions

    def writing(self) -> AbstractContextManager[Connection]:
        """One transaction that is durable when the block ends and undone when it raises."""
        return self._transaction(Mode.WRITING)

    def reading(self) -> AbstractContextManager[Connection]:
        """One transaction in which all statements see the same state."""
        return self._transaction(Mode.READING)

    @contextmanager
    def _transaction(self, mode: Mode) -> Iterator[Connection]:
        # Waiting for oneself would be for ever.
        assert self._owner != get_ident(), "this thread has a transaction open; use that one"
        with self._lock:
            self._owner = get_ident()
            connection = self.connection
            try:
                self._check_usable()
                try:
                    self._begin(mode)
                    yield connection
                    if mode is Mode.WRITING:
                        self._end()
                    connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
                if mode is Mode.WRITING:
                    self._committed()
            except Superseded as error:
                self._lose(error)
                raise
            except MemoryError as exc:
                raise exhausted(self.name, "no memory") from exc
            except DRIVER_ERRORS as exc:
                if connection.is_broken:
                    raise self._lose(self._why_lost()) from exc
                raise self._translated(exc) from exc
            finally:
                self._owner = None

    def _translated(self, exc: Exception) -> StoreError:
        """What a driver reported, as our error; after a disk's failure nothing is used again."""
        error = translate(exc, name=self.name, is_in_use=self.is_in_use)
        if isinstance(error, DiskFailed):
            self._failed = error
        return error

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self.connection.is_closed:
            raise StoreError(f"the ledger {self.name} is closed; open it again to use it")
        if self.connection.is_broken:
            raise self._lose(self._why_lost())

    # Losing it

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        """Calls `tell` once, from any thread, when this process may no longer write."""
        self._listeners.append(tell)
        if self._lost is not None:
            tell(self._lost)

    @property
    def is_lost(self) -> bool:
        """Whether this process can never write here again: taken over, cut off or closed."""
        return self._lost is not None or self.connection.is_closed

    def _lose(self, error: StoreError) -> StoreError:
        if self._lost is None:
            self._lost = error
            for tell in self._listeners:
                tell(error)
        return self._lost

    # Closing

    def close(self) -> None:
        """Gives the connection and what it locks back; harmless when repeated.

        Waits for a call under way, but not for a server that answers no more.
        """
        self._closing()
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            self._hang_up()
            self._lock.acquire()
        try:
            self._close()
        finally:
            self._lock.release()

    def _closing(self) -> None:
        """Called first by `close`, while another thread's call may still be under way."""

    def _hang_up(self) -> None:
        """Ends the call that waits for a server; SQLite's calls end by themselves."""

    def _last_words(self) -> None:
        """Called by `close` under the lock, while the connection still works."""

    def _close(self) -> None:
        connection = self.connection
        try:
            if self._failed is None and not (connection.is_closed or connection.is_broken):
                self._last_words()
        finally:
            if self._failed is None:
                connection.close()
            else:
                _ABANDONED.append(connection)


def translate(exc: Exception, *, name: str, is_in_use: bool = False) -> StoreError:
    """The error Atoll raises for what a database driver reported.

    Of a SQLite file that `is_in_use` only a lack of files keeps SQLite from opening another.
    """
    told = exc if isinstance(exc, DriverError) else DriverError(exc)
    said = str(exc)
    if told.is_disconnect:
        return lost(name)
    if "database or disk is full" in said or told.sqlstate == _POSTGRES_DISK_FULL:
        what = f"the ledger {name} found no room on its disk and recorded nothing of this call"
        return errors.StorageFull(f"{what}; free some space and send it again")
    if "out of memory" in said or told.sqlstate == _POSTGRES_OUT_OF_MEMORY:
        return exhausted(name, said)
    if _CANNOT_OPEN in said and (is_in_use or not open_files.is_one_left()):
        return exhausted(name, said)
    if "disk I/O error" in said:
        what = f"the disk of the ledger {name} answered {said!r}; nothing of this call counts"
        return DiskFailed(f"{what}. This process stops; check the disk and start it again")
    if "database is locked" in said:
        what = f"the ledger {name} is held by another process; only one may open it at a time"
        return errors.StateHeld(f"{what}, so stop that one first")
    if isinstance(exc, UnicodeDecodeError) or any(phrase in said for phrase in _SQLITE_DAMAGED):
        what = f"the ledger {name} cannot be read as a database ({said})"
        return errors.StateDamaged(f"{what}; {REPAIR}")
    if told.breaks_schema:
        what = f"the ledger {name} refused a row that breaks its schema ({said})"
        return StoreError(f"{what}; nothing of this call was recorded")
    what = f"the ledger {name} answered {said!r} and recorded nothing of this call"
    return StoreError(f"{what}; see that its disk or server works, then start again")


def exhausted(name: str, said: str) -> StoreError:
    """The error of a ledger for which the system has no more files or memory just now."""
    what = f"the ledger {name} found no file or memory free ({said}) and recorded nothing"
    return errors.Exhausted(f"{what}; it is tried again until there is some")


def lost(name: str) -> StoreError:
    """The error of a connection that is gone."""
    what = f"the connection to the ledger {name} was lost, and with it the right to write"
    way_out = "restart this process: it reads there whether the last change was recorded"
    return errors.StoreAway(f"{what}; {way_out}")
