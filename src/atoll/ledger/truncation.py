"""Takes a ledger back to an earlier round, in the caller's transaction.

The rounds after it go with all that hangs on them. Rows that they had been given are open again:
those beyond the cursor by themselves, those of leases that they had taken over by reopening these.
A manifest version that is recorded for a later round is in force from the next one on.
"""

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import Connection, delete, func, insert, select, update

from atoll import canonical
from atoll.ledger import queues, rows, schema
from atoll.ledger.records import LeaseRecord, LeaseState

Range = tuple[int, int]


def truncate(connection: Connection, *, last_round: int) -> None:
    """Forgets every round after `last_round`, which is published, or 0."""
    for table in (schema.evaluations, schema.snapshots):
        connection.execute(delete(table).where(table.c.version > last_round))
    for table in (schema.contributions, schema.leases, schema.rounds):
        connection.execute(delete(table).where(table.c.round > last_round))
    _reopen(connection)
    queues.rebuild(connection)
    # Islands have adopted what was in force in a round that is gone, and follow no way back.
    table = schema.manifests
    connection.execute(
        update(table).where(table.c.from_round > last_round + 1).values(from_round=last_round + 1)
    )


def disband(connection: Connection) -> None:
    """Nobody is in: every island registers again and learns where the run is."""
    connection.execute(update(schema.workers).values(active=False))
    table = schema.generations
    newest = connection.execute(select(func.max(table.c.number))).scalar_one() or 0
    connection.execute(
        insert(table).values(number=newest + 1, created_wall=0.0, members=canonical.dumps([]))
    )


def _reopen(connection: Connection) -> None:
    """Leases whose rows are in no other one any more, as the rounds that took them are gone."""
    kept = [rows.lease(row) for row in connection.execute(select(schema.leases))]
    cuts = {queue.name: queue.cut for queue in queues.read(connection).sound}
    covered: dict[str, list[Range]] = {}  # by the dataset, whose row sequence positions count in
    for lease in kept:
        if lease.state is not LeaseState.TAKEN:
            covered.setdefault(lease.dataset_id, []).append((lease.start, lease.stop))
    taken = [lease for lease in kept if lease.state is LeaseState.TAKEN]
    for lease in sorted(taken, key=lambda lease: (lease.start, lease.stop)):
        others = covered.setdefault(lease.dataset_id, [])
        for start, stop in _outside((lease.start, lease.stop), others):
            cut = cuts.get(lease.queue)
            unit = lease.unit if cut is None else cut.unit(start)
            _put(
                connection,
                replace(lease, start=start, stop=stop, unit=unit, state=LeaseState.REOPENED),
            )
            others.append((start, stop))


def _put(connection: Connection, lease: LeaseRecord) -> None:
    """Inserts the lease, in place of one of the same key: a lease that was split may be there."""
    table = schema.leases
    values = rows.values(lease)
    connection.execute(
        delete(table).where(*(column == values[column.name] for column in table.primary_key))
    )
    connection.execute(insert(table), values)


def _outside(whole: Range, covered: Iterable[Range]) -> list[Range]:
    """The parts of `whole` that no range of `covered` holds, in order."""
    found = []
    start, stop = whole
    for low, high in sorted(covered):
        if high <= start or low >= stop:
            continue
        if low > start:
            found.append((start, low))
        start = max(start, high)
    if start < stop:
        found.append((start, stop))
    return found
