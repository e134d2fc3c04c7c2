"""What is durable, read past the code under test: the ledger's rows as SQLite itself gives them."""

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

from atoll.ledger.connection import Connection
from atoll.simulate.faults import terms
from atoll.simulate.faults.terms import Terms

Row: TypeAlias = Any  # a named tuple of its table's columns
Place = tuple[int, str, str, int]  # round, worker_id, dataset_id, start


@lru_cache
def _row_of(columns: tuple[str, ...]) -> Callable[[Any], Row]:
    made = namedtuple("Row", columns)  # type: ignore[misc]  # the columns are the database's
    return made._make


@lru_cache
def _words(statement: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", statement))


def _grouped(rows: list[Row], *names: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    key = attrgetter(*names)
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


@dataclass(eq=False)
class Table:
    """One table's rows at one moment. Consecutive views share the tables that did not change."""

    values: list[tuple[Any, ...]] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    _grouped: dict[tuple[str, ...], dict[Any, list[Row]]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows with names for their columns."""
        return list(map(_row_of(self.columns), self.values))

    def grouped(self, *names: str) -> dict[Any, list[Row]]:
        """The rows by what they have in these columns: one value, or a tuple of several."""
        if names not in self._grouped:
            self._grouped[names] = _grouped(self.rows, *names)
        return self._grouped[names]

    def by(self, *names: str) -> dict[Any, Row]:
        """The same for columns that tell every row from the others."""
        return {key: rows[-1] for key, rows in self.grouped(*names).items()}


@dataclass(eq=False)
class View:
    """The ledger's tables at one moment. What is asked of it is put together once, when it is."""

    tables: dict[str, Table] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """A table of the ledger; empty before there is one."""
        return self.tables.get(name) or Table()

    def differs(self, other: "View", *names: str) -> bool:
        """Whether a row of these tables, or without names of any, is another one in `other`."""
        pairs = [(self.table(n), other.table(n)) for n in names or self.tables | other.tables]
        return any(mine is not theirs and mine.values != theirs.values for mine, theirs in pairs)

    @cached_property
    def rounds(self) -> dict[int, Row]:
        """Every round by its number."""
        return self.table("rounds").by("round")

    @cached_property
    def open_rounds(self) -> list[int]:
        """Rounds that take contributions, oldest first."""
        return sorted(number for number, row in self.rounds.items() if row.state == "open")

    @property
    def leases(self) -> list[Row]:
        """Every lease there ever was."""
        return self.table("leases").rows

    @cached_property
    def places(self) -> dict[Place, list[Row]]:
        """The leases of the same rows in the same round, by lease epoch."""
        by_epoch = sorted(self.leases, key=attrgetter("lease_epoch"))
        return _grouped(by_epoch, "round", "worker_id", "dataset_id", "start")

    @cached_property
    def ends(self) -> dict[str, int]:
        """Where the leases of each dataset end."""
        found = self.table("leases").grouped("dataset_id")
        return {dataset_id: max(lease.stop for lease in found[dataset_id]) for dataset_id in found}

    @cached_property
    def workers(self) -> dict[str, Row]:
        """Every worker, whether it is in or out."""
        return self.table("workers").by("worker_id")

    @cached_property
    def contributions(self) -> dict[tuple[int, str], Row]:
        """What was accepted, by the round it was made for and its worker."""
        return self.table("contributions").by("round", "worker_id")

    @cached_property
    def snapshots(self) -> dict[int, Row]:
        """The snapshots by version."""
        return self.table("snapshots").by("version")

    @cached_property
    def control(self) -> dict[str, str]:
        """The operator's orders."""
        return {row.name: row.value for row in self.table("control").rows}

    @cached_property
    def generation(self) -> int:
        """The newest generation's number."""
        return max((row.number for row in self.table("generations").rows), default=0)

    @cached_property
    def version(self) -> int:
        """The newest published round."""
        return max((n for n, row in self.rounds.items() if row.state == "published"), default=0)

    def leased(self, round_number: int, worker_id: str, state: str = "leased") -> list[Row]:
        """A worker's leases in a round that are in `state`."""
        found = self.table("leases").grouped("round", "worker_id", "state")
        return found.get((round_number, worker_id, state), [])

    def holding(self, round_number: int) -> set[str]:
        """Workers with a lease in the round that has not come to an end."""
        found = self.table("leases").grouped("round").get(round_number, ())
        return {row.worker_id for row in found if row.state in ("leased", "done")}

    def accepted(self, round_number: int) -> list[Row]:
        """What the round folds, in worker_id order, by code point."""
        found = self.table("contributions").grouped("applied").get(round_number, [])
        return sorted(found, key=attrgetter("worker_id", "round"))

    def earlier_tokens(self, worker_id: str, first: int, round_number: int) -> int:
        """Tokens of what the worker handed in for rounds from `first` to before `round_number`."""
        made = (self.contributions.get((n, worker_id)) for n in range(first, round_number))
        return sum(row.tokens for row in made if row is not None)

    def terms(self, round_number: int) -> Terms:
        """The manifest that the round is under, and the strategy that answers for it."""
        manifests = self.table("manifests").rows
        return terms.read([row.body for row in manifests if row.from_round <= round_number][-1])


class Watched:
    """The connection of an open ledger; reads again only the tables that were written to."""

    def __init__(self, connection: Connection) -> None:
        self._driver = connection.driver
        found = self._driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._names = {name for (name,) in found}
        self._stale: set[str] = set()
        self._changes = -1
        self._view = View()

    def written(self, statement: str) -> None:
        """This statement may change the tables that it names."""
        self._stale |= self._names & _words(statement)

    def view(self) -> View:
        """The tables now."""
        changes = self._driver.total_changes
        if changes != self._changes:
            read = {name: self._read(name) for name in self._stale or self._names}
            self._view = View(self._view.tables | read)
            self._changes, self._stale = changes, set()
        return self._view

    def _read(self, name: str) -> Table:
        cursor = self._driver.execute(f'SELECT * FROM "{name}"')
        values, before = cursor.fetchall(), self._view.table(name)
        if before.values == values:
            return before
        return Table(values, tuple(column[0] for column in cursor.description))
