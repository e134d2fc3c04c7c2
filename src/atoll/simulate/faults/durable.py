"""What is durable, read past the code under test: the ledger's rows as SQLite itself gives them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from atoll.ledger.connection import Connection

Row = dict[str, Any]
Place = tuple[int, str, str, int]  # round, worker_id, dataset_id, start


@dataclass(frozen=True)
class View:
    """The ledger's tables at one moment; equal exactly when every row is.

    What is asked of it is put together once, when it is.
    """

    tables: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict, compare=False)

    def rows(self, table: str) -> list[Row]:
        """A table's rows by column name."""
        names = self.columns.get(table, [])
        return [dict(zip(names, row, strict=True)) for row in self.tables.get(table, [])]

    @cached_property
    def rounds(self) -> dict[int, Row]:
        """Every round by its number."""
        return {row["round"]: row for row in self.rows("rounds")}

    @cached_property
    def leases(self) -> list[Row]:
        """Every lease there ever was."""
        return self.rows("leases")

    @cached_property
    def places(self) -> dict[Place, list[Row]]:
        """The leases of the same rows in the same round, by lease epoch."""
        return _by_place(self.leases)

    @cached_property
    def workers(self) -> dict[str, Row]:
        """Every worker, whether it is in or out."""
        return {row["worker_id"]: row for row in self.rows("workers")}

    @cached_property
    def contributions(self) -> dict[tuple[int, str], Row]:
        """What was accepted, by the round it was made for and its worker."""
        return {(row["round"], row["worker_id"]): row for row in self.rows("contributions")}

    @cached_property
    def snapshots(self) -> dict[int, Row]:
        """The snapshots by version."""
        return {row["version"]: row for row in self.rows("snapshots")}

    @cached_property
    def control(self) -> dict[str, str]:
        """The operator's orders."""
        return {row["name"]: row["value"] for row in self.rows("control")}

    @cached_property
    def generation(self) -> int:
        """The newest generation's number."""
        return max((row["number"] for row in self.rows("generations")), default=0)

    @cached_property
    def version(self) -> int:
        """The newest published round."""
        return max((n for n, row in self.rounds.items() if row["state"] == "published"), default=0)

    @property
    def latest(self) -> Row | None:
        """The round with the highest number."""
        return self.rounds[max(self.rounds)] if self.rounds else None

    def holding(self, round_number: int) -> set[str]:
        """Workers with a lease in the round that has not come to an end."""
        return {
            row["worker_id"]
            for row in self.leases
            if row["round"] == round_number and row["state"] in ("leased", "done")
        }

    def accepted(self, round_number: int) -> list[Row]:
        """What the round folds, in worker_id order, by code point."""
        found = [row for row in self.contributions.values() if row["applied"] == round_number]
        return sorted(found, key=lambda row: (str(row["worker_id"]), row["round"]))

    def manifest_body(self, round_number: int) -> str:
        """Of the version that the round is under."""
        bodies = [r["body"] for r in self.rows("manifests") if r["from_round"] <= round_number]
        return str(bodies[-1])


def _by_place(leases: list[Row]) -> dict[Place, list[Row]]:
    found: dict[Place, list[Row]] = {}
    for lease in sorted(leases, key=lambda lease: int(lease["lease_epoch"])):
        place = lease["round"], lease["worker_id"], lease["dataset_id"], lease["start"]
        found.setdefault(place, []).append(lease)
    return found


class Watched:
    """The connection of an open ledger; reads again only when something was written."""

    def __init__(self, connection: Connection) -> None:
        driver = connection.driver
        self._driver = driver
        found = driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        # How each table is read, and what its columns are called.
        self._tables = {name: f'SELECT * FROM "{name}"' for name in sorted(n for (n,) in found)}
        self._columns = {
            name: [column[0] for column in driver.execute(statement).description]
            for name, statement in self._tables.items()
        }
        self._changes = -1
        self._view = View()

    def view(self) -> View:
        """The tables now."""
        changes = self._driver.total_changes
        if changes != self._changes:
            read = self._driver.execute
            tables = {name: read(how).fetchall() for name, how in self._tables.items()}
            self._view = View(tables, self._columns)
            self._changes = changes
        return self._view
