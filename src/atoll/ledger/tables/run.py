"""The run itself: its manifests, its credentials, and what its operator wants."""

from collections.abc import Mapping

from sqlalchemy import bindparam, delete, insert, select

from atoll.errors import StoreError
from atoll.ledger.connection import Connection
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.rounds import RoundTable

_RUN = select(schema.runs)
_INSERT_RUN = insert(schema.runs)
_MANIFESTS = select(schema.manifests).order_by(schema.manifests.c.version)
_INSERT_MANIFEST = insert(schema.manifests)
_CREDENTIALS = select(schema.credentials).order_by(schema.credentials.c.role)
_INSERT_CREDENTIAL = insert(schema.credentials)
_DELETE_CREDENTIAL = delete(schema.credentials).where(
    schema.credentials.c.role == bindparam("of_role")
)
_CONTROL = select(schema.control).order_by(schema.control.c.name)
_INSERT_CONTROL = insert(schema.control)
_DELETE_CONTROL = delete(schema.control).where(schema.control.c.name == bindparam("of_name"))


class RunTable:
    """The one run of a ledger."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> RunRecord | None:
        """The run, once it was created."""
        row = self._connection.row(_RUN)
        return None if row is None else RunRecord(*row)

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


class ManifestTable:
    """The versions of the run's manifest."""

    def __init__(self, connection: Connection, rounds: RoundTable) -> None:
        self._connection = connection
        self._rounds = rounds

    def all(self) -> list[ManifestRecord]:
        """All versions, oldest first."""
        return [ManifestRecord(*row) for row in self._connection.rows(_MANIFESTS)]

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


class CredentialTable:
    """By role, the sha256 (hex) of its token."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def all(self) -> dict[str, str]:
        """The stored hash of each role."""
        return {role: sha256 for role, sha256 in self._connection.rows(_CREDENTIALS)}

    def set(self, hashes: Mapping[str, str]) -> None:
        """Replaces the stored hash of each given role."""
        for role, sha256 in hashes.items():
            self._connection.change(_DELETE_CREDENTIAL, {"of_role": role})
            self._connection.change(_INSERT_CREDENTIAL, {"role": role, "sha256": sha256})


class ControlTable:
    """What the operator wants, by name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def all(self) -> dict[str, str]:
        """Every name with its value."""
        return {name: value for name, value in self._connection.rows(_CONTROL)}

    def set(self, values: Mapping[str, str | None]) -> None:
        """Sets each name to its value; None takes the name away."""
        for name, value in values.items():
            self._connection.change(_DELETE_CONTROL, {"of_name": name})
            if value is not None:
                self._connection.change(_INSERT_CONTROL, {"name": name, "value": value})
