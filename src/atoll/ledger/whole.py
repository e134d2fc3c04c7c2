"""What is done with every row at once: the hash of the state, and a copy of it."""

import hashlib
import os
from pathlib import Path

from sqlalchemy import Connection, Table, insert, select

from atoll import canonical
from atoll import files as filesystem
from atoll.errors import StorageFull, StoreError
from atoll.ledger import connect, migrations, schema, wal
from atoll.ledger.database import Database

# Rows held in memory at a time.
_BATCH = 500


def state_hash(connection: Connection) -> str:
    """See `Ledger.state_hash`."""
    digest = hashlib.sha256()
    for name in sorted(schema.metadata.tables):
        table = schema.metadata.tables[name]
        statement = select(table).order_by(*table.primary_key.columns)
        for row in connection.execute(statement.execution_options(yield_per=_BATCH)):
            digest.update(canonical.dumps([name, *(_exact(value) for value in row)]).encode())
            digest.update(b"\n")
    return digest.hexdigest()


def _exact(value: object) -> object:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes):
        return value.hex()
    return value


def copy(database: Database, path: str) -> None:
    """See `Ledger.copy_to`; StoreError when something is at `path` already."""
    if os.path.lexists(path):
        raise StoreError(f"a file {path!r} exists; a copy is a new file, so choose another path")
    try:
        if database.is_sqlite:
            _vacuum_into(database, path)
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


def _vacuum_into(database: Database, path: str) -> None:
    with database.bare() as connection:
        connection.exec_driver_sql("VACUUM INTO ?", (path,))
    # SQLite leaves this to the caller.
    filesystem.sync(Path(path))
    filesystem.sync(Path(path).parent)


def _copy_rows(database: Database, path: str) -> None:
    target = connect.sqlite(path)
    try:
        migrations.migrate(target)
        with database.reading() as source, target.writing() as sink:
            # In the order of the foreign keys.
            for table in schema.metadata.sorted_tables:
                if table is not schema.schema_version:
                    _copy_table(source, sink, table)  # sealed as every transaction is
    finally:
        target.close()
    if not wal.is_folded(Path(path)):
        raise StorageFull(f"no room for the copy {path!r}; free some there, or choose another path")


def _copy_table(source: Connection, sink: Connection, table: Table) -> None:
    result = source.execute(select(table).execution_options(yield_per=_BATCH))
    for batch in result.partitions():
        sink.execute(insert(table), [row._asdict() for row in batch])
