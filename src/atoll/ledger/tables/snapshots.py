"""What is recorded of versions of the weights: their snapshots, and evaluations of them."""

from dataclasses import dataclass

from sqlalchemy import bindparam, delete, select

from atoll.errors import StoreError
from atoll.ledger.records import EvaluationRecord, SnapshotRecord
from atoll.ledger.tables import schema
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.table import RecordTable

_SNAPSHOTS = schema.snapshots
_DROP = schema.STATEMENTS[_SNAPSHOTS.name].delete
_DROP_BELOW = delete(_SNAPSHOTS).where(_SNAPSHOTS.c.version < bindparam("below"))

_EVALUATIONS = schema.evaluations
_EVALUATIONS_FROM = (
    select(_EVALUATIONS)
    .where(_EVALUATIONS.c.version >= bindparam("first"))
    .order_by(_EVALUATIONS.c.version, _EVALUATIONS.c.worker_id)
)


class SnapshotTable(RecordTable):
    """Which versions can be restored without replaying what came before."""

    def all(self) -> list[SnapshotRecord]:
        """Oldest first."""
        return self._all(SnapshotRecord)

    def add(self, snapshot: SnapshotRecord) -> None:
        """Records it; the same one again, as after a replay, changes nothing."""
        held = self._find(SnapshotRecord, snapshot.version)
        if held is None:
            self._add(snapshot)
        elif held != snapshot:
            rule = "a version has one snapshot, so run the audit to see which is right"
            raise StoreError(f"the ledger already has {held!r} and is given {snapshot!r}; {rule}")

    def drop(self, version: int) -> None:
        """Forgets the snapshot of this version."""
        self._connection.change(_DROP, {"of_version": version})

    def drop_below(self, version: int) -> None:
        """Forgets the snapshots of earlier versions."""
        self._connection.change(_DROP_BELOW, {"below": version})


@dataclass
class EvaluationTable(RecordTable):
    """Held-out losses, as workers reported them."""

    _members: MemberTable

    def add(self, evaluation: EvaluationRecord) -> None:
        """The first report of a (version, worker_id) stands; a repeated one changes nothing.

        UnknownWorker when its worker is not registered.
        """
        self._members.check_known(evaluation.worker_id)
        if self._find(EvaluationRecord, evaluation.version, evaluation.worker_id) is None:
            self._add(evaluation)

    def all(self, *, first: int = 0) -> list[EvaluationRecord]:
        """Of version `first` and later ones, in (version, worker_id) order."""
        return self._records(EvaluationRecord, _EVALUATIONS_FROM, {"first": first})
