"""A SQLite ledger's database: its log is folded in by us, and its rows are sealed."""

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from atoll.errors import StateDamaged, StorageFull
from atoll.ledger.connection import DRIVER_ERRORS, Connection, Mode
from atoll.ledger.database import Database
from atoll.ledger.records import LedgerDamage
from atoll.ledger.sqlite import seals, wal

log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 4 << 20  # of write-ahead log; SQLite's own default, 1,000 pages
CHECKPOINT_COMMITS = 64  # at most so many between two, once the log is that long

# IMMEDIATE takes the write lock up front: a transaction never finds out halfway that it may not
# write. The driver runs in autocommit mode and begins nothing by itself.
_BEGIN = {Mode.READING: "BEGIN", Mode.WRITING: "BEGIN IMMEDIATE", Mode.BARE: None}
_HAS_TABLE = "SELECT 1 FROM main.sqlite_master WHERE type = 'table' AND name = ?"


class SqliteDatabase(Database):
    """The database in a file, or in memory when `path` is None.

    Safe to share: what it counts changes inside transactions, under their lock; whether it is
    sealed is settled before a second thread has it.
    """

    def __init__(self, connection: Connection, *, name: str, path: Path | None) -> None:
        super().__init__(connection, name=name)
        self._log = None if path is None else wal.path_of(path)
        self._checked_bytes = 0  # how long the log was at the last checkpoint
        self._commits = 0  # since then
        self._is_sealed = False  # whether transactions keep the seals

    def bare(self) -> AbstractContextManager[Connection]:
        """The connection outside any transaction, as PRAGMA and VACUUM need it."""
        return self._transaction(Mode.BARE)

    def has_table(self, name: str) -> bool:
        return self.connection.row(_HAS_TABLE, (name,)) is not None

    def _begin(self, mode: Mode) -> None:
        self.connection.begin(mode, _BEGIN[mode])
        if self._is_sealed and mode is Mode.WRITING:
            seals.begin(self.connection)

    def _end(self) -> None:
        if self._is_sealed:
            seals.end(self.connection)

    def made(self) -> None:
        seals.make(self.connection)

    def changed(self) -> None:
        seals.renew(self.connection)

    def migrated(self) -> None:
        with self.bare() as connection:
            seals.watch(connection)
        self._is_sealed = True
        self.is_in_use = True

    def unseal(self) -> None:
        """From here on transactions leave the seals alone; the caller makes them again."""
        self._is_sealed = False

    def damage(self) -> list[LedgerDamage]:
        try:
            with self.bare() as connection:
                found = seals.check(connection)
        except StateDamaged as error:
            found = [LedgerDamage(place="", key="", reason=str(error))]
        return [replace(damage, ledger=f"the ledger {self.name}") for damage in found]

    def _committed(self) -> None:
        """A checkpoint when the log is long; the next transaction begins it anew.

        Its file keeps its length, so that it grew is one sign of a long log, and commits another.
        """
        if self._log is None:
            return
        log_bytes = wal.nbytes(self._log)
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
        try:
            self.connection.begin(Mode.BARE, None)
            self.connection.rows("PRAGMA wal_checkpoint(PASSIVE)")
        except MemoryError:  # what was committed is: only the log stays long
            log.warning("no memory to shorten the ledger's log", extra={"ledger": self.name})
        except DRIVER_ERRORS as exc:
            error = self._translated(exc)
            if not isinstance(error, StorageFull):
                raise error from exc
            log.warning("no room to shorten the ledger's log", extra={"ledger": self.name})
        finally:
            self.connection.mode = Mode.IDLE

    def _last_words(self) -> None:
        if self._log is not None:
            self._checkpoint()
