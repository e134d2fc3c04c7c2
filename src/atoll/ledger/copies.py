"""Copies of a whole ledger, as new SQLite files."""

import os
from itertools import islice
from pathlib import Path

from atoll import files as filesystem
from atoll.errors import StorageFull, StoreError
from atoll.ledger import migrations
from atoll.ledger.connection import BATCH, Connection
from atoll.ledger.database import Database
from atoll.ledger.sqlite import connect, wal
from atoll.ledger.sqlite.database import SqliteDatabase
from atoll.ledger.tables import schema


def copy(database: Database, path: str) -> None:
    """See `Ledger.copy_to`; StoreError when something is at `path` already."""
    if os.path.lexists(path):
        raise StoreError(f"a file {path!r} exists; a copy is a new file, so choose another path")
    try:
        if isinstance(database, SqliteDatabase):
            with database.bare() as connection:
                connection.rows("VACUUM INTO ?", (path,))
            # SQLite leaves this to the caller.
            filesystem.sync(Path(path))
            filesystem.sync(Path(path).parent)
        else:
            _copy_rows(database, path)
    except BaseException as exc:
        # Half a copy would look like a ledger.
        for leftover in (path, f"{path}-wal", f"{path}-journal"):
            Path(leftover).unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise StoreError(
                f"the copy {path!r} could not be written ({exc.strerror}); choose another path"
            ) from exc
        raise


def _copy_rows(database: Database, path: str) -> None:
    target = connect.open_file(path)
    try:
        migrations.migrate(target)
        with database.reading() as source, target.writing() as sink:
            # In the order of the foreign keys.
            for table in schema.metadata.sorted_tables:
                if table is not schema.schema_version:
                    _copy_table(source, sink, table.name)  # sealed as every transaction is
    finally:
        target.close()
    if not wal.is_folded(Path(path)):
        raise StorageFull(f"no room for the copy {path!r}; free some there, or choose another path")


def _copy_table(source: Connection, sink: Connection, name: str) -> None:
    places = ", ".join("?" * len(schema.metadata.tables[name].columns))
    found = source.stream(schema.STATEMENTS[name].all)
    while batch := list(islice(found, BATCH)):
        sink.change_each(f'INSERT INTO "{name}" VALUES ({places})', batch)
