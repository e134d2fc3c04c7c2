"""From an empty database to the ledger's tables, in one step.

Nothing is released, so there is one version: whoever changes the tables raises `VERSION`, and a
ledger of any other is refused. The first release freezes this step; later ones append to it.
"""

from functools import cache

from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from atoll.errors import LedgerVersion, StateDamaged
from atoll.ledger.database import REPAIR, Database
from atoll.ledger.tables import schema

VERSION = 10
_VERSIONS = schema.STATEMENTS[schema.schema_version.name]


def migrate(database: Database) -> None:
    """Makes the tables where there are none; LedgerVersion when they are of another version.

    From then on every transaction of this database keeps the seals.
    """
    stored = stored_version(database)
    if stored == 0:
        with database.writing() as connection:
            for statement in statements(connection.dialect):
                connection.change(statement)
            connection.change(_VERSIONS.insert, {"version": VERSION})
            database.made()
    else:
        check_version(stored, name=database.name)
    database.migrated()


def check_version(stored: int, *, name: str) -> None:
    """LedgerVersion unless `stored` is the version whose tables this program reads."""
    if stored != VERSION:
        found = f"the ledger {name} has version {stored} and this program reads version {VERSION}"
        way_out = "use the Atoll that wrote it, or start a new run in another directory"
        raise LedgerVersion(f"{found} alone; {way_out}")


def stored_version(database: Database) -> int:
    """The version of the tables in this database; 0 when there are none."""
    with database.reading() as connection:
        if not database.has_table(schema.schema_version.name):
            return 0
        found = [version for [version] in connection.rows(_VERSIONS.all)]
    if len(found) != 1 or not isinstance(found[0], int) or found[0] < 1:
        raise StateDamaged(
            f"the ledger {database.name} holds the versions {found!r} of its tables and must hold "
            f"one, a number from 1; {REPAIR}"
        )
    return found[0]


@cache
def statements(dialect: Dialect) -> tuple[str, ...]:
    """The statements that make every table of `schema`; a table comes after those it refers to."""
    made = []
    for table in schema.metadata.sorted_tables:
        made.append(CreateTable(table).compile(dialect=dialect))
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        made += [CreateIndex(index).compile(dialect=dialect) for index in indexes]
    return tuple(str(statement) for statement in made)
