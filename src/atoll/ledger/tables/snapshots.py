"""What is recorded of versions of the weights: their snapshots, and evaluations of them."""

from sqlalchemy import bindparam, delete, insert, select

from atoll.errors import StoreError
from atoll.ledger.connection import Connection
from atoll.ledger.records import EvaluationRecord, SnapshotRecord
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.table import RecordTable

_SNAPSHOTS = schema.snapshots
_IS_VERSION = _SNAPSHOTS.c.version == bindparam("of_version")
_FIND = select(_SNAPSHOTS).where(_IS_VERSION)
_ALL = select(_SNAPSHOTS).order_by(_SNAPSHOTS.c.version)
_INSERT = insert(_SNAPSHOTS)
_DROP = delete(_SNAPSHOTS).where(_IS_VERSION)
_DROP_BELOW = delete(_SNAPSHOTS).where(_SNAPSHOTS.c.version < bindparam("below"))

_EVALUATIONS = schema.evaluations
_FIND_EVALUATION = select(_EVALUATIONS.c.version).where(
    _EVALUATIONS.c.version == bindparam("of_version"),
    _EVALUATIONS.c.worker_id == bindparam("of_worker"),
)
_INSERT_EVALUATION = insert(_EVALUATIONS)
_EVALUATIONS_FROM = (
    select(_EVALUATIONS)
    .where(_EVALUATIONS.c.version >= bindparam("first"))
    .order_by(_EVALUATIONS.c.version, _EVALUATIONS.c.worker_id)
)


class SnapshotTable(RecordTable):
    """Which versions can be restored without replaying what came before."""

    def all(self) -> list[SnapshotRecord]:
        """Oldest first."""
        return self._records(SnapshotRecord, _ALL)

    def add(self, snapshot: SnapshotRecord) -> None:
        """Records it; the same one again, as after a replay, changes nothing."""
        held = self._record(SnapshotRecord, _FIND, {"of_version": snapshot.version})
        if held is None:
            self._connection.change(_INSERT, rows.values(snapshot))
        elif held != snapshot:
            raise StoreError(
                f"the ledger already has {held!r} and is given {snapshot!r}; "
                f"a version has one snapshot, so run the audit to see which is right"
            )

    def drop(self, version: int) -> None:
        """Forgets the snapshot of this version."""
        self._connection.change(_DROP, {"of_version": version})

    def drop_below(self, version: int) -> None:
        """Forgets the snapshots of earlier versions."""
        self._connection.change(_DROP_BELOW, {"below": version})


class EvaluationTable(RecordTable):
    """Held-out losses, as workers reported them."""

    def __init__(self, connection: Connection, members: MemberTable) -> None:
        super().__init__(connection)
        self._members = members

    def add(self, evaluation: EvaluationRecord) -> None:
        """The first report of a (version, worker_id) stands; a repeated one changes nothing.

        UnknownWorker when its worker is not registered.
        """
        self._members.check_known(evaluation.worker_id)
        key = {"of_version": evaluation.version, "of_worker": evaluation.worker_id}
        if self._connection.row(_FIND_EVALUATION, key) is None:
            self._connection.change(_INSERT_EVALUATION, rows.values(evaluation))

    def all(self, *, first: int = 0) -> list[EvaluationRecord]:
        """Of version `first` and later ones, in (version, worker_id) order."""
        return self._records(EvaluationRecord, _EVALUATIONS_FROM, {"first": first})
