"""What all tables share: they read and add records on the connection of their transaction."""

from sqlalchemy import Executable

from atoll.ledger.connection import Connection, Values
from atoll.ledger.tables import rows
from atoll.ledger.tables.rows import R


class RecordTable:
    """One or several tables; of use inside a transaction of `connection` alone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _records(self, kind: type[R], statement: Executable, values: Values = ()) -> list[R]:
        """All rows that the statement gives, as records of this kind."""
        return [rows.read(kind, row) for row in self._connection.rows(statement, values)]

    def _record(self, kind: type[R], statement: Executable, values: Values = ()) -> R | None:
        """The first of them, or None."""
        found = self._connection.row(statement, values)
        return None if found is None else rows.read(kind, found)
