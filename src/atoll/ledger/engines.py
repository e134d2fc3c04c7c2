"""From a path or URL to an open ledger on the engine it names."""

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from atoll.errors import ConfigError, StoreError
from atoll.ledger import migrations
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.ledger.postgres import connect as postgres
from atoll.ledger.postgres.epochs import LEASE_SECONDS
from atoll.ledger.sqlite import connect as sqlite


def open_ledger(url_or_path: str | Path, *, lease_seconds: float = LEASE_SECONDS) -> Ledger:
    """The ledger at a path, `:memory:`, `sqlite:///…` or `postgresql://…`, with its tables.

    Makes it when absent. Raises StateHeld when another process has it open, LedgerVersion when
    another release wrote it, StoreError when it cannot be reached. On PostgreSQL another process
    may take it over when this one has been silent for `lease_seconds`.
    """
    database = open_database(url_or_path, lease_seconds=lease_seconds)
    try:
        migrations.migrate(database)
    except StoreError:
        database.close()
        raise
    return Ledger(database)


def file_of(url_or_path: str | Path) -> Path | None:
    """The SQLite file at a path or URL; None when a server has the ledger."""
    url = _url(url_or_path)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _url(url_or_path: str | Path) -> URL:
    if isinstance(url_or_path, Path) or "://" not in url_or_path:
        return URL.create("sqlite", database=str(url_or_path))
    try:
        return make_url(url_or_path)
    except ArgumentError as exc:
        # Not quoted back: it may hold a password.
        forms = "postgresql://user:password@host:port/database or sqlite:///path"
        raise ConfigError(f"the ledger's URL cannot be read; it is {forms}") from exc


def open_database(url_or_path: str | Path, *, lease_seconds: float = LEASE_SECONDS) -> Database:
    """The database at a path or URL, as it is: no table is made."""
    url = _url(url_or_path)
    match url.get_backend_name():
        case "sqlite":
            return sqlite.open_file(url.database or sqlite.MEMORY)
        case "postgresql":
            return postgres.open_server(url, lease_seconds=lease_seconds)
    known = "give a path, sqlite:///… or postgresql://…"
    raise ConfigError(f"ledger {url.drivername!r} is not an engine Atoll uses; {known}")
