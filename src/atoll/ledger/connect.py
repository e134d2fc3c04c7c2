"""How a database is reached so that one process alone writes it, durably.

Opens connections and refuses a second holder. Makes no table and knows no record.
"""

import os
import socket
from pathlib import Path
from types import ModuleType

from sqlalchemy import URL, Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from atoll.errors import StateDamaged, StateHeld, StoreError
from atoll.ledger import database, wal
from atoll.ledger.database import Database

MEMORY = ":memory:"
# A holder keeps its lock for life, so waiting for one is of no use; this is for a passing reader
# and for one that has just died.
BUSY_MILLISECONDS = 500
# Any constant does as long as nobody else uses it: the first 8 bytes of sha256("atoll ledger").
ADVISORY_KEY = 0x3EFF3A682FC2EE6C
_LOCK_NOT_AVAILABLE = "55P03"

_PRAGMAS = (
    f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}",
    # Before journal_mode: then the WAL index lives in memory and no -shm file is left behind.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
)


def sqlite(path: str) -> Database:
    """The SQLite database at `path`, made when absent; StateHeld when another process has it."""
    engine = create_engine(
        URL.create("sqlite", database=path),
        module=sqlite_module(),
        poolclass=NullPool,
        # The lock of Database serialises threads; isolation_level=None leaves BEGIN to us.
        connect_args={"isolation_level": None, "check_same_thread": False},
    )
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(
            f"the ledger {path!r} lies in a directory that does not exist; make it first"
        )
    torn = wal.check(Path(path)) if path != MEMORY else None
    if torn is not None:
        raise StateDamaged(f"the log of the ledger is damaged: {torn}")
    try:
        connection = engine.connect()
    except database.DRIVER_ERRORS as exc:
        raise database.translate(exc, name=repr(path)) from exc
    opened = Database(connection, name=repr(path))
    try:
        with opened.bare() as bare:
            for pragma in _PRAGMAS:
                bare.exec_driver_sql(pragma).close()
            # EXCLUSIVE is taken at the first access, and a write shows that it really is ours.
            bare.exec_driver_sql("BEGIN IMMEDIATE")
    except StoreError:
        opened.close()
        raise
    return opened


def sqlite_module() -> ModuleType:
    """The driver: the bundled SQLite where there is one."""
    # With a single connection either library is safe; the bundled one is newer than most systems'.
    try:
        from pysqlite3 import dbapi2
    except ImportError:
        import sqlite3 as dbapi2
    module: ModuleType = dbapi2
    return module


def postgres(url: URL) -> Database:
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
        connect_args={"application_name": f"atoll pid {os.getpid()} on {socket.gethostname()}"},
    )
    try:
        connection = engine.connect()
    except database.DRIVER_ERRORS as exc:
        raise database.translate(exc, name=name) from exc
    opened = Database(connection, name=name)
    try:
        with opened.writing() as first:
            _take(first, name)
            # A server may default to acknowledging before its log is on disk.
            first.execute(text("SELECT set_config('synchronous_commit', 'on', false)"))
    except StoreError:
        opened.close()
        raise
    return opened


def _take(connection: Connection, name: str) -> None:
    """Takes the advisory lock for the life of the session, or says who has it."""
    try:
        with connection.begin_nested():
            # The session of a killed process takes a moment to end.
            wait = text("SELECT set_config('lock_timeout', :wait, true)")
            connection.execute(wait, {"wait": str(BUSY_MILLISECONDS)})
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_KEY})
            connection.execute(wait, {"wait": "0"})
    except OperationalError as exc:
        if getattr(exc.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
            raise
        raise StateHeld(
            f"the ledger {name} is held by {_holder(connection)}; only one coordinator may open "
            f"it, so stop that one first"
        ) from exc


def _holder(connection: Connection) -> str:
    # A bigint key is stored in pg_locks as its two halves.
    holder = connection.execute(
        text(
            "SELECT pid, application_name, backend_start "
            "FROM pg_locks JOIN pg_stat_activity USING (pid) "
            "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
            "AND classid = :high AND objid = :low AND pg_locks.database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        ),
        {"high": ADVISORY_KEY >> 32, "low": ADVISORY_KEY & 0xFFFFFFFF},
    ).first()
    if holder is None:
        return "a process that has just ended"
    return (
        f"{holder.application_name!r} since {holder.backend_start:%Y-%m-%d %H:%M:%S %Z} "
        f"(server process {holder.pid})"
    )
