"""What all tables share: they read and change rows on the connection of their transaction."""

from dataclasses import dataclass

from sqlalchemy import Executable

from atoll.ledger.connection import Connection, Values
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.rows import R


@dataclass
class RecordTable:
    """One or several tables; used only inside a transaction of the connection."""

    _connection: Connection

    def _records(self, kind: type[R], statement: Executable, values: Values = ()) -> list[R]:
        """All rows that the statement gives, as records of this kind."""
        return [rows.read(kind, row) for row in self._connection.rows(statement, values)]

    def _record(self, kind: type[R], statement: Executable, values: Values = ()) -> R | None:
        """The first of them, or None."""
        return next(iter(self._records(kind, statement, values)), None)

    def _all(self, kind: type[R]) -> list[R]:
        """Every record of this kind, in the order of their keys."""
        return self._records(kind, schema.STATEMENTS[schema.NAMES[kind]].all)

    def _find(self, kind: type[R], *key: object) -> R | None:
        """The record with this key, whose parts come in the order of the record's fields."""
        statements = schema.STATEMENTS[schema.NAMES[kind]]
        return self._record(kind, statements.find, dict(zip(statements.key, key, strict=True)))

    def _add(self, *records: R) -> None:
        """Inserts records of one kind."""
        for kind in {type(record) for record in records}:
            insert = schema.STATEMENTS[schema.NAMES[kind]].insert
            self._connection.change_each(insert, [rows.values(record) for record in records])
