"""The ledger: durable, ordered records of one run, read and changed by transaction.

    with ledger.writing() as t:
        t.rounds.freeze(...)

A transaction happens whole or not at all, and when a writing one has ended its effect survives a
crash. Refusals are typed errors and change nothing. Safe to use from several threads: transactions
take turns, and a thread has one at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.errors import AtollError
from atoll.ledger import copies
from atoll.ledger.database import Database
from atoll.ledger.records import LedgerDamage
from atoll.ledger.tables.transaction import Transaction


class Ledger:
    """One run's records, on a database whose tables are made."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._transaction = Transaction(database.connection)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """One transaction that is durable when the block ends and undone when it raises."""
        with self._database.writing():
            yield self._transaction

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """One transaction in which all that is read is of the same moment; it changes nothing."""
        with self._database.reading():
            yield self._transaction

    # The right to write

    def identity(self) -> str | None:
        """A name that tells this database from its copies; None for a file, which has a path."""
        return self._database.identity

    def check_held(self) -> None:
        """Superseded when another process has taken this ledger over."""
        self._database.check_held()

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        """Calls `tell` once, from any thread, when this process may no longer write."""
        self._database.on_lost(tell)

    # Whole

    def damage(self) -> list[LedgerDamage]:
        """What is no longer as it was written; reads every row. Nothing on PostgreSQL."""
        return self._database.damage()

    def state_hash(self) -> str:
        """See `Transaction.state_hash`."""
        with self.reading() as t:
            return t.state_hash()

    def copy_to(self, path: str) -> None:
        """Writes a consistent copy of the whole ledger as a new SQLite file at `path`."""
        copies.copy(self._database, path)

    def close(self) -> None:
        """Gives the database back; harmless when repeated."""
        self._database.close()
