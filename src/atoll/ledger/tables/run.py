"""The run itself: its manifests, its credentials, and what its operator wants."""

from collections.abc import Mapping

from sqlalchemy import Table, bindparam, delete, insert, select

from atoll.errors import StoreError
from atoll.ledger.connection import Connection
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.rounds import RoundTable
from atoll.ledger.tables.table import RecordTable

_RUN = select(schema.runs)
_INSERT_RUN = insert(schema.runs)
_MANIFESTS = select(schema.manifests).order_by(schema.manifests.c.version)
_INSERT_MANIFEST = insert(schema.manifests)
# Of each table that maps names to values: all of its rows, one more, and one less.
_NAMED = {
    table: (
        select(table).order_by(*table.primary_key),
        insert(table),
        delete(table).where(*(column == bindparam("of_name") for column in table.primary_key)),
    )
    for table in (schema.credentials, schema.control)
}


class RunTable(RecordTable):
    """The one run of a ledger."""

    def get(self) -> RunRecord | None:
        """The run, once it was created."""
        return self._record(RunRecord, _RUN)

    def create(self, run: RunRecord, manifest: ManifestRecord) -> None:
        """Records the run; StoreError when the ledger already holds one."""
        held = self.get()
        if held is not None:
            raise StoreError(
                f"the ledger already holds run {held.run_id!r} and takes no other "
                f"({run.run_id!r}); give the new run a state directory of its own"
            )
        self._connection.change(_INSERT_RUN, rows.values(run))
        self._connection.change(_INSERT_MANIFEST, rows.values(manifest))


class ManifestTable(RecordTable):
    """The versions of the run's manifest."""

    def __init__(self, connection: Connection, rounds: RoundTable) -> None:
        super().__init__(connection)
        self._rounds = rounds

    def all(self) -> list[ManifestRecord]:
        """All versions, oldest first."""
        return self._records(ManifestRecord, _MANIFESTS)

    def add(self, manifest: ManifestRecord) -> None:
        """Records the next version, in force from the first round that is not planned yet.

        StoreError unless its number follows the newest one's and its first round the latest one.
        """
        held = self.all()
        newest = held[-1].version if held else 0
        if not newest or manifest.version != newest + 1:
            raise StoreError(
                f"manifest version {manifest.version} does not follow version {newest}; versions "
                f"count up by one"
            )
        latest = self._rounds.latest()
        following = 1 if latest is None else latest.round + 1
        if manifest.from_round != following:
            raise StoreError(
                f"manifest version {manifest.version} is to be in force from round "
                f"{manifest.from_round}; the first round that is not planned is {following}"
            )
        if any(manifest.sha256 == known.sha256 for known in held):
            raise StoreError(
                f"manifest version {manifest.version} has the sha256 of an earlier one; every "
                f"version carries its number, so no two are the same"
            )
        self._connection.change(_INSERT_MANIFEST, rows.values(manifest))


class NamedValues:
    """A table of texts by their names, such as the hash of each role's token."""

    def __init__(self, connection: Connection, table: Table) -> None:
        self._connection = connection
        self._columns = table.columns.keys()
        self._all, self._insert, self._delete = _NAMED[table]

    def all(self) -> dict[str, str]:
        """Every name with its value."""
        return {name: value for name, value in self._connection.rows(self._all)}

    def set(self, values: Mapping[str, str | None]) -> None:
        """Sets each name to its value; None takes the name away."""
        for name, value in values.items():
            self._connection.change(self._delete, {"of_name": name})
            if value is not None:
                row = dict(zip(self._columns, (name, value), strict=True))
                self._connection.change(self._insert, row)
