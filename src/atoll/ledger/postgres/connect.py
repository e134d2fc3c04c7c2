"""Opens a PostgreSQL database so that one process alone writes it. Makes none of its tables."""

from typing import Any

from sqlalchemy import URL
from sqlalchemy.dialects.postgresql import psycopg as dialects

from atoll.errors import StoreError
from atoll.ledger import database
from atoll.ledger.connection import Connection, DriverError
from atoll.ledger.postgres import epochs
from atoll.ledger.postgres.database import PostgresDatabase

CONNECT_SECONDS = 10  # without it a server that hangs is waited for for ever
_DIALECT: Any = dialects.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy's


def open_server(url: URL, *, lease_seconds: float = epochs.LEASE_SECONDS) -> PostgresDatabase:
    """The PostgreSQL database at `url`; StateHeld, naming the holder, when another has it."""
    # Without the query, which may hold a password too.
    name = repr(url.set(query={}).render_as_string(hide_password=True))
    try:
        connection = connected(url, name)
    except DriverError as exc:
        raise database.translate(exc, name=name) from exc
    opened = PostgresDatabase(connection, name=name, connect=lambda: connected(url, name))
    try:
        opened.hold(lease_seconds=lease_seconds)
    except StoreError:
        opened.close()
        raise
    return opened


def connected(url: URL, name: str) -> Connection:
    """A connection that holds nothing yet."""
    try:
        import psycopg
    except ImportError as exc:
        missing = f"the ledger {name} needs psycopg, which is not installed"
        raise StoreError(f"{missing}; run: pip install 'atoll[postgres]'") from exc
    _, arguments = _DIALECT.create_connect_args(url)
    name_here = epochs.name_of_this_process()
    arguments |= {"application_name": name_here, "connect_timeout": CONNECT_SECONDS}
    try:
        raw = psycopg.connect(**arguments)
    except psycopg.Error as exc:
        raise DriverError(exc) from exc
    raw.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    return Connection(raw, psycopg, _DIALECT)
