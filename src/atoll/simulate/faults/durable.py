"""What is durable, read past the code under test: the ledger's rows as SQLite itself gives them."""

from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from atoll.ledger.connection import Connection

Row = dict[str, Any]
Place = tuple[int, str, str, int]  # round, worker_id, dataset_id, start


class Table:
    """One table's rows at one moment. Consecutive views share the tables that did not change."""

    def __init__(self, columns: Sequence[str] = (), values: Sequence[tuple[Any, ...]] = ()) -> None:
        self.values = values
        self._columns = columns
        self._grouped: dict[tuple[str, ...], dict[Any, list[Row]]] = {}

    @cached_property
    def rows(self) -> list[Row]:
        """The rows by column name."""
        return [dict(zip(self._columns, row, strict=True)) for row in self.values]

    def grouped(self, *names: str) -> dict[Any, list[Row]]:
        """The rows by what they have in these columns: one value, or a tuple of several."""
        if names not in self._grouped:
            found = self._grouped[names] = {}
            key = itemgetter(*names)
            for row in self.rows:
                found.setdefault(key(row), []).append(row)
        return self._grouped[names]

    def by(self, *names: str) -> dict[Any, Row]:
        """The same for columns that tell every row from the others."""
        return {key: rows[-1] for key, rows in self.grouped(*names).items()}


class View:
    """The ledger's tables at one moment. What is asked of it is put together once, when it is."""

    def __init__(self, tables: dict[str, Table] | None = None) -> None:
        self._tables = tables or {}

    def table(self, name: str) -> Table:
        """A table of the ledger; empty before there is one."""
        return self._tables.get(name) or Table()

    def differs(self, other: "View", *names: str) -> bool:
        """Whether a row of these tables, or without names of any, is another one in `other`."""
        pairs = [(self.table(n), other.table(n)) for n in names or self._tables | other._tables]
        return any(mine is not theirs and mine.values != theirs.values for mine, theirs in pairs)

    @cached_property
    def rounds(self) -> dict[int, Row]:
        """Every round by its number."""
        return self.table("rounds").by("round")

    @property
    def leases(self) -> list[Row]:
        """Every lease there ever was."""
        return self.table("leases").rows

    @cached_property
    def places(self) -> dict[Place, list[Row]]:
        """The leases of the same rows in the same round, by lease epoch."""
        found: dict[Place, list[Row]] = {}
        place = itemgetter("round", "worker_id", "dataset_id", "start")
        for lease in sorted(self.leases, key=itemgetter("lease_epoch")):
            found.setdefault(place(lease), []).append(lease)
        return found

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
        return {row["name"]: row["value"] for row in self.table("control").rows}

    @cached_property
    def generation(self) -> int:
        """The newest generation's number."""
        return max((row["number"] for row in self.table("generations").rows), default=0)

    @cached_property
    def version(self) -> int:
        """The newest published round."""
        return max((n for n, row in self.rounds.items() if row["state"] == "published"), default=0)

    def leased(self, round_number: int, worker_id: str, state: str = "leased") -> list[Row]:
        """A worker's leases in a round that are in `state`."""
        found = self.table("leases").grouped("round", "worker_id", "state")
        return found.get((round_number, worker_id, state), [])

    def holding(self, round_number: int) -> set[str]:
        """Workers with a lease in the round that has not come to an end."""
        found = self.table("leases").grouped("round", "state")
        held = [row for state in ("leased", "done") for row in found.get((round_number, state), ())]
        return {row["worker_id"] for row in held}

    def accepted(self, round_number: int) -> list[Row]:
        """What the round folds, in worker_id order, by code point."""
        found = self.table("contributions").grouped("applied").get(round_number, [])
        return sorted(found, key=lambda row: (str(row["worker_id"]), row["round"]))

    def manifest_body(self, round_number: int) -> str:
        """Of the version that the round is under."""
        manifests = self.table("manifests").rows
        return str([row["body"] for row in manifests if row["from_round"] <= round_number][-1])


class Watched:
    """The connection of an open ledger; reads again only when something was written."""

    def __init__(self, connection: Connection) -> None:
        self._driver = connection.driver
        found = self._driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        # How each table is read.
        self._reads = {name: f'SELECT * FROM "{name}"' for name in sorted(n for (n,) in found)}
        self._changes = -1
        self._tables: dict[str, Table] = {}
        self._view = View()

    def view(self) -> View:
        """The tables now."""
        changes = self._driver.total_changes
        if changes != self._changes:
            self._tables = {name: self._read(name) for name in self._reads}
            self._view, self._changes = View(self._tables), changes
        return self._view

    def _read(self, name: str) -> Table:
        cursor = self._driver.execute(self._reads[name])
        values, before = cursor.fetchall(), self._tables.get(name)
        if before is not None and before.values == values:
            return before
        return Table([column[0] for column in cursor.description], values)
