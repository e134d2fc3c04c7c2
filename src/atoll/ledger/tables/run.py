"""The run itself: its manifests, its credentials, and what its operator wants."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Table

from atoll.errors import StoreError
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.ledger.tables import schema
from atoll.ledger.tables.rounds import RoundTable
from atoll.ledger.tables.table import RecordTable


class RunTable(RecordTable):
    """The one run of a ledger."""

    def get(self) -> RunRecord | None:
        """The run, once it was created."""
        return next(iter(self._all(RunRecord)), None)

    def create(self, run: RunRecord, manifest: ManifestRecord) -> None:
        """Records the run; StoreError when the ledger already holds one."""
        held = self.get()
        if held is not None:
            told = f"the ledger already holds run {held.run_id!r} and takes no other"
            raise StoreError(
                f"{told} ({run.run_id!r}); give the new run a state directory of its own"
            )
        self._add(run)
        self._add(manifest)


@dataclass
class ManifestTable(RecordTable):
    """The versions of the run's manifest."""

    _rounds: RoundTable

    def all(self) -> list[ManifestRecord]:
        """All versions, oldest first."""
        return self._all(ManifestRecord)

    def add(self, manifest: ManifestRecord) -> None:
        """Records the next version, in force from the first round that is not planned yet.

        StoreError unless its number follows the newest one's and its first round the latest one.
        """
        held, what = self.all(), f"manifest version {manifest.version}"
        newest = held[-1].version if held else 0
        if not newest or manifest.version != newest + 1:
            raise StoreError(f"{what} does not follow version {newest}; versions count up by one")
        latest = self._rounds.latest()
        following = 1 if latest is None else latest.round + 1
        if manifest.from_round != following:
            first = f"the first round that is not planned is {following}"
            raise StoreError(f"{what} is to be in force from round {manifest.from_round}; {first}")
        if any(manifest.sha256 == known.sha256 for known in held):
            rule = "every version carries its number, so no two are the same"
            raise StoreError(f"{what} has the sha256 of an earlier one; {rule}")
        self._add(manifest)


@dataclass
class NamedValues(RecordTable):
    """A table of texts by their names, such as the hash of each role's token."""

    _table: Table

    def all(self) -> dict[str, str]:
        """Every name with its value."""
        return dict(self._connection.rows(schema.STATEMENTS[self._table.name].all))

    def set(self, values: Mapping[str, str | None]) -> None:
        """Sets each name to its value; None takes the name away."""
        statements = schema.STATEMENTS[self._table.name]
        for name, value in values.items():
            self._connection.change(statements.delete, dict.fromkeys(statements.key, name))
            if value is not None:
                row = dict(zip(self._table.columns.keys(), (name, value), strict=True))
                self._connection.change(statements.insert, row)
