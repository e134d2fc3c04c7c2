"""From an empty database, or from the version before, to the ledger's tables.

Nothing is released, so there are two versions at most: whoever changes the tables raises `VERSION`
and says in `added` what the one before lacks. A ledger of any other is refused. The first release
freezes these steps; later ones append to them.
"""

from functools import cache

from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from atoll.errors import LedgerVersion, StateDamaged
from atoll.ledger.database import REPAIR, Database
from atoll.ledger.tables import schema

VERSION = 11
_VERSIONS = schema.STATEMENTS[schema.schema_version.name]
_NEW_TABLES = (schema.publishers, schema.announcements, schema.skips)


def migrate(database: Database) -> None:
    """Makes the tables where there are none, and adds to those of the version before.

    LedgerVersion when they are of another version; StateDamaged when those of the version before
    are not as they were written, which only the program that wrote them can repair. From then on
    every transaction of this database keeps the seals.
    """
    stored = stored_version(database)
    if stored == 0:
        with database.writing() as connection:
            for statement in statements(connection.dialect):
                connection.change(statement)
            connection.change(_VERSIONS.insert, {"version": VERSION})
            database.made()
    elif stored == VERSION - 1:
        _add(database)
    else:
        check_version(stored, name=database.name)
    database.migrated()


def _add(database: Database) -> None:
    """What the version before lacks, in one transaction."""
    damages = database.damage()
    if damages:
        # Seals are made anew afterwards: what is wrong now would never be seen again.
        raise StateDamaged(
            f"{damages[0]}; the tables are of version {VERSION - 1} and stay as they are; repair "
            f"them with the Atoll that wrote them, or restore a copy"
        )
    with database.writing() as connection:
        for statement in added(connection.dialect):
            connection.change(statement)
        connection.change(_VERSIONS.delete, {"of_version": VERSION - 1})
        connection.change(_VERSIONS.insert, {"version": VERSION})
        database.changed()


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


@cache
def added(dialect: Dialect) -> tuple[str, ...]:
    """The statements that make the tables of the version before those of this one."""
    made = [CreateTable(table).compile(dialect=dialect) for table in _NEW_TABLES]
    column = CreateColumn(schema.rounds.c.artifact_sha256).compile(dialect=dialect)
    return (*map(str, made), f"ALTER TABLE {schema.rounds.name} ADD COLUMN {column}")
