"""Opens a SQLite file so that one process alone writes it, durably. Makes no table."""

from functools import cache
from pathlib import Path
from types import ModuleType

from sqlalchemy.dialects import sqlite as dialects

from atoll.errors import StateDamaged, StoreError
from atoll.ledger import database
from atoll.ledger.connection import Connection, DriverError
from atoll.ledger.sqlite import wal
from atoll.ledger.sqlite.database import SqliteDatabase

MEMORY = ":memory:"
# A holder keeps its lock for life, so waiting for one is of no use; this is for a passing reader
# and for one that has just died.
BUSY_MILLISECONDS = 500

_PRAGMAS = (
    f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}",
    # Before journal_mode: then the WAL index lives in memory and no -shm file is left behind.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA wal_autocheckpoint = 0",  # `SqliteDatabase` does it, and hears when the disk fails
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
)
_DIALECT = dialects.dialect()
_STATEMENTS = 256  # that SQLite keeps parsed; the ledger has about half as many


def open_file(path: str) -> SqliteDatabase:
    """The SQLite database at `path`, made when absent; StateHeld when another process has it."""
    file = None if path == MEMORY else Path(path)
    if file is not None and not file.parent.is_dir():
        place = f"the ledger {path!r} lies in a directory that does not exist"
        raise StoreError(f"{place}; make it first")
    torn = None if file is None else wal.check(file)
    if torn is not None:
        raise StateDamaged(f"the log of the ledger is damaged: {torn}")
    opened = SqliteDatabase(_connected(path), name=repr(path), path=file)
    try:
        with opened.bare() as bare:
            for pragma in _PRAGMAS:
                # Read to its end: that is where a disk that failed underway is told.
                bare.rows(pragma)
        with opened.writing():
            pass  # EXCLUSIVE is taken at the first access, and this shows that it really is ours
    except StoreError:
        opened.close()
        raise
    return opened


def _connected(path: str) -> Connection:
    module = driver()
    try:
        # The lock of Database serialises threads; isolation_level=None leaves BEGIN to us.
        raw = module.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS
        )
    except module.Error as exc:
        raise database.translate(DriverError(exc), name=repr(path)) from exc
    return Connection(raw, module, _DIALECT)


@cache
def driver() -> ModuleType:
    """The bundled SQLite where there is one."""
    # With a single connection either library is safe; the bundled one is newer than most systems'.
    try:
        from pysqlite3 import dbapi2
    except ImportError:
        import sqlite3 as dbapi2
    module: ModuleType = dbapi2
    return module
