"""Statements about versions of the weights: their snapshots and evaluations."""

from sqlalchemy import Connection, bindparam, delete, insert, select

from atoll.errors import StoreError
from atoll.ledger import members, rows, schema
from atoll.ledger.records import EvaluationRecord, SnapshotRecord

_SNAPSHOTS = schema.snapshots
_FIND_SNAPSHOT = select(_SNAPSHOTS).where(_SNAPSHOTS.c.version == bindparam("version"))
_ALL_SNAPSHOTS = select(_SNAPSHOTS).order_by(_SNAPSHOTS.c.version)
_INSERT_SNAPSHOT = insert(_SNAPSHOTS)
_DROP_SNAPSHOTS = delete(_SNAPSHOTS).where(_SNAPSHOTS.c.version < bindparam("below_version"))


def add_snapshot(connection: Connection, snapshot: SnapshotRecord) -> None:
    """See `Ledger.add_snapshot`; the same one again, as after a replay, changes nothing."""
    row = connection.execute(_FIND_SNAPSHOT, {"version": snapshot.version}).one_or_none()
    if row is None:
        connection.execute(_INSERT_SNAPSHOT, rows.values(snapshot))
        return
    held = rows.snapshot(row)
    if held != snapshot:
        raise StoreError(
            f"the ledger already has {held!r} and is given {snapshot!r}; "
            f"a version has one snapshot, so run the audit to see which is right"
        )


def snapshots(connection: Connection) -> list[SnapshotRecord]:
    """See `Ledger.snapshots`."""
    return [rows.snapshot(row) for row in connection.execute(_ALL_SNAPSHOTS)]


def drop_snapshots(connection: Connection, *, below_version: int) -> None:
    """See `Ledger.drop_snapshots`."""
    connection.execute(_DROP_SNAPSHOTS, {"below_version": below_version})


def add_evaluation(connection: Connection, evaluation: EvaluationRecord) -> None:
    """See `Ledger.add_evaluation`; UnknownWorker when its worker is not registered."""
    members.check_known(connection, evaluation.worker_id)
    table = schema.evaluations
    statement = select(table.c.version).where(
        table.c.version == evaluation.version, table.c.worker_id == evaluation.worker_id
    )
    if connection.execute(statement).one_or_none() is None:
        connection.execute(insert(table), rows.values(evaluation))


def evaluations(connection: Connection, *, first: int) -> list[EvaluationRecord]:
    """See `Ledger.evaluations`."""
    table = schema.evaluations
    statement = (
        select(table).where(table.c.version >= first).order_by(table.c.version, table.c.worker_id)
    )
    return [rows.evaluation(row) for row in connection.execute(statement)]
