"""Statements about versions of the weights: their snapshots and evaluations."""

from sqlalchemy import Connection, delete, insert, select

from atoll.errors import StoreError
from atoll.ledger import members, rows, schema
from atoll.ledger.records import EvaluationRecord, SnapshotRecord


def add_snapshot(connection: Connection, snapshot: SnapshotRecord) -> None:
    """See `Ledger.add_snapshot`; the same one again, as after a replay, changes nothing."""
    statement = select(schema.snapshots).where(schema.snapshots.c.version == snapshot.version)
    row = connection.execute(statement).one_or_none()
    if row is None:
        connection.execute(insert(schema.snapshots), rows.values(snapshot))
        return
    held = rows.snapshot(row)
    if held != snapshot:
        raise StoreError(
            f"the ledger already has {held!r} and is given {snapshot!r}; "
            f"a version has one snapshot, so run the audit to see which is right"
        )


def snapshots(connection: Connection) -> list[SnapshotRecord]:
    """See `Ledger.snapshots`."""
    statement = select(schema.snapshots).order_by(schema.snapshots.c.version)
    return [rows.snapshot(row) for row in connection.execute(statement)]


def drop_snapshots(connection: Connection, *, below_version: int) -> None:
    """See `Ledger.drop_snapshots`."""
    table = schema.snapshots
    connection.execute(delete(table).where(table.c.version < below_version))


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
