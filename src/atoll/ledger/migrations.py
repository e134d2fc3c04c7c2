"""From an empty database to the ledger's tables, in one step.

Nothing is released, so there is one version: whoever changes the tables raises `VERSION`, and a
ledger of any other is refused. The first release freezes this step; later ones append to it.
"""

from functools import cache

from sqlalchemy import Connection, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from atoll.errors import LedgerVersion, StateDamaged
from atoll.ledger import schema, seals
from atoll.ledger.database import Database

VERSION = 6
_DIALECTS = {"sqlite": sqlite.dialect, "postgresql": postgresql.dialect}


def migrate(database: Database) -> None:
    """Makes the tables where there are none; LedgerVersion when they are of another version.

    From then on every transaction of this database keeps the seals.
    """
    with database.reading() as connection:
        stored = stored_version(connection, name=database.name)
    if stored == 0:
        with database.writing() as connection:
            _make(connection)
    else:
        check_version(stored, name=database.name)
    if database.is_sqlite:
        database.at_commit = seals.Sealing(database)


def check_version(stored: int, *, name: str) -> None:
    """LedgerVersion unless this program made tables of the version `stored`."""
    if stored != VERSION:
        raise LedgerVersion(
            f"the ledger {name} has version {stored} and this program reads version {VERSION} "
            f"alone; use the Atoll that wrote it, or start a new run in another directory"
        )


def stored_version(connection: Connection, *, name: str) -> int:
    """The version of the tables in this database; 0 when there are none."""
    if not inspect(connection).has_table(schema.schema_version.name):
        return 0
    found = list(connection.execute(select(schema.schema_version.c.version)).scalars())
    if len(found) != 1 or not isinstance(found[0], int) or found[0] < 1:
        raise StateDamaged(
            f"the ledger {name} holds the versions {found!r} of its tables and must hold one, a "
            f"number from 1; `atoll repair` shows what of it can be kept, or restore it from a copy"
        )
    return found[0]


def _make(connection: Connection) -> None:
    for statement in _statements(connection.dialect.name):
        connection.exec_driver_sql(statement)
    connection.execute(schema.schema_version.insert().values(version=VERSION))
    seals.make(connection)


@cache
def _statements(engine: str) -> tuple[str, ...]:
    """What makes every table of `schema`, in the order of their references."""
    dialect = _DIALECTS[engine]()
    made = []
    for table in schema.metadata.sorted_tables:
        made.append(CreateTable(table).compile(dialect=dialect))
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        made += [CreateIndex(index).compile(dialect=dialect) for index in indexes]
    return tuple(str(statement) for statement in made)
