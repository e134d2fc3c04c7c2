"""How a database is reached so that one process alone writes it, durably.

Opens connections and refuses a second holder. Makes no table and knows no record.
"""

from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlalchemy import URL, Engine, NullPool, create_engine

from atoll.errors import StateDamaged, StoreError
from atoll.ledger import database, epochs
from atoll.ledger import wal as logs
from atoll.ledger.database import Database

MEMORY = ":memory:"
# A holder keeps its lock for life, so waiting for one is of no use; this is for a passing reader
# and for one that has just died.
BUSY_MILLISECONDS = 500

CONNECT_SECONDS = 10  # of PostgreSQL; without it a server that hangs is waited for for ever

_PRAGMAS = (
    f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}",
    # Before journal_mode: then the WAL index lives in memory and no -shm file is left behind.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA wal_autocheckpoint = 0",  # `Database` does it, and hears when the disk fails
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
)


def sqlite(path: str) -> Database:
    """The SQLite database at `path`, made when absent; StateHeld when another process has it."""
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(
            f"the ledger {path!r} lies in a directory that does not exist; make it first"
        )
    torn = logs.check(Path(path)) if path != MEMORY else None
    if torn is not None:
        raise StateDamaged(f"the log of the ledger is damaged: {torn}")
    _OPENING.set(path)
    try:
        connection = _sqlite_engine().connect()
    except database.DRIVER_ERRORS as exc:
        raise database.translate(exc, name=repr(path)) from exc
    wal = None if path == MEMORY else Path(f"{path}-wal")
    opened = Database(connection, name=repr(path), wal=wal)
    try:
        with opened.bare() as bare:
            for pragma in _PRAGMAS:
                answer = bare.exec_driver_sql(pragma)
                if answer.returns_rows:
                    # Read to its end: that is where a disk that failed underway is told.
                    answer.fetchall()
            # EXCLUSIVE is taken at the first access, and a write shows that it really is ours.
            bare.exec_driver_sql("BEGIN IMMEDIATE")
    except StoreError:
        opened.close()
        raise
    return opened


_OPENING: ContextVar[str] = ContextVar("the SQLite file that is being opened")


@cache
def _sqlite_engine() -> Engine:
    """One for all files: SQLAlchemy keeps with it the text of every statement it has compiled."""
    module = sqlite_module()

    def connect() -> Any:
        # The lock of Database serialises threads; isolation_level=None leaves BEGIN to us.
        return module.connect(_OPENING.get(), isolation_level=None, check_same_thread=False)

    return create_engine("sqlite://", module=module, creator=connect, poolclass=NullPool)


def sqlite_module() -> ModuleType:
    """The driver: the bundled SQLite where there is one."""
    # With a single connection either library is safe; the bundled one is newer than most systems'.
    try:
        from pysqlite3 import dbapi2
    except ImportError:
        import sqlite3 as dbapi2
    module: ModuleType = dbapi2
    return module


def postgres(url: URL, *, lease_seconds: float = epochs.LEASE_SECONDS) -> Database:
    """The PostgreSQL database at `url`; StateHeld, naming the holder, when another has it."""
    # Without the query, which may hold a password too.
    name = repr(url.set(query={}).render_as_string(hide_password=True))
    try:
        import psycopg  # noqa: F401  only to say in time what to install
    except ImportError as exc:
        raise StoreError(
            f"the ledger {name} needs psycopg, which is not installed; "
            f"run: pip install 'atoll[postgres]'"
        ) from exc
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        poolclass=NullPool,
        isolation_level="SERIALIZABLE",
        connect_args={
            "application_name": epochs.name_of_this_process(),
            "connect_timeout": CONNECT_SECONDS,
        },
    )
    try:
        connection = engine.connect()
    except database.DRIVER_ERRORS as exc:
        raise database.translate(exc, name=name) from exc
    opened = Database(connection, name=name)
    try:
        epochs.hold(opened, lease_seconds=lease_seconds)
    except StoreError:
        opened.close()
        raise
    return opened
