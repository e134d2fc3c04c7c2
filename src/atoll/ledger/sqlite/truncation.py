"""Takes a ledger back to an earlier round, in the caller's transaction.

The rounds after it go with all that hangs on them, and so do contributions that they were to fold,
whichever round these were made for. Rows that they had been given are open again: those beyond the
cursor by themselves, those of leases that they had taken over by reopening these. A manifest
version that is recorded for a later round is in force from the next one on.
"""

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import BindParameter, bindparam, delete, func, select, tuple_, update

from atoll import canonical
from atoll.ledger.records import LeaseRecord, LeaseState
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.transaction import Transaction

Range = tuple[int, int]

_CONTRIBUTIONS, _LEASES = schema.contributions, schema.leases
_LATER: BindParameter[int] = bindparam("last_round")
_DROP = tuple(
    delete(table).where(column > _LATER)
    for table, column in (
        (schema.evaluations, schema.evaluations.c.version),
        (schema.snapshots, schema.snapshots.c.version),
        (_CONTRIBUTIONS, _CONTRIBUTIONS.c.applied),
        (_LEASES, _LEASES.c.round),
        (schema.announcements, schema.announcements.c.round),
        (schema.skips, schema.skips.c.round),
        (schema.parts, schema.parts.c.round),
        (schema.checkpoints, schema.checkpoints.c.round),
        (schema.rounds, schema.rounds.c.round),
    )
)
# Steps of rounds that are gone would be among them; ranks go back to the checkpoint that stays.
_DROP_SAVES = delete(schema.saves)
_UNFOLDED = select(_CONTRIBUTIONS.c.round, _CONTRIBUTIONS.c.worker_id).where(
    _CONTRIBUTIONS.c.applied > _LATER
)
_IS_UNFOLDED = tuple_(_LEASES.c.round, _LEASES.c.worker_id).in_(_UNFOLDED)
_REOPEN_UNFOLDED = (
    update(_LEASES)
    .where(_LEASES.c.state == LeaseState.DONE.value, _IS_UNFOLDED)
    .values(state=LeaseState.REOPENED.value)
)
_MOVE_MANIFESTS = (
    update(schema.manifests)
    .where(schema.manifests.c.from_round > bindparam("next_round"))
    .values(from_round=bindparam("new_round"))
)
_OF_LEASES = schema.STATEMENTS[_LEASES.name]
_NOBODY_IS_IN = update(schema.workers).values(active=False)
_NEWEST_GENERATION = select(func.max(schema.generations.c.number))
_INSERT_GENERATION = schema.STATEMENTS[schema.generations.name].insert


def truncate(t: Transaction, *, last_round: int) -> None:
    """Forgets every round after `last_round`, which must be a published round, or 0 for all."""
    t.connection.change(_REOPEN_UNFOLDED, {"last_round": last_round})
    every = [rows.read(LeaseRecord, row) for row in t.connection.rows(_OF_LEASES.all)]
    dropped = [lease for lease in every if lease.round > last_round]
    for statement in _DROP:
        t.connection.change(statement, {"last_round": last_round})
    t.connection.change(_DROP_SAVES)
    _reopen(t, dropped, last_round=last_round)
    t.queues.rebuild()
    # Islands have adopted what was in force in a round that is gone, and follow no way back.
    following = last_round + 1
    t.connection.change(_MOVE_MANIFESTS, {"next_round": following, "new_round": following})


def disband(t: Transaction) -> None:
    """Nobody is in: every island registers again and learns where the run is."""
    t.connection.change(_NOBODY_IS_IN)
    newest = t.connection.value(_NEWEST_GENERATION) or 0
    made = {"number": newest + 1, "created_wall": 0.0, "members": canonical.dumps([])}
    t.connection.change(_INSERT_GENERATION, made)


def _reopen(t: Transaction, dropped: Iterable[LeaseRecord], *, last_round: int) -> None:
    """Reopens taken leases, or parts of them, whose rows no remaining lease covers.

    Also `dropped` leases, as far as rows after theirs are kept: a round that was filled up late has
    rows behind those of rounds that were planned before that.
    """
    kept = [rows.read(LeaseRecord, row) for row in t.connection.rows(_OF_LEASES.all)]
    cuts = {queue.name: queue.cut for queue in t.queues.all().sound}
    covered: dict[str, list[Range]] = {}  # by the dataset, whose row sequence positions count in
    for lease in kept:
        if lease.state is not LeaseState.TAKEN:
            covered.setdefault(lease.dataset_id, []).append((lease.start, lease.stop))
    ends = {name: max(stop for _, stop in ranges) for name, ranges in covered.items()}
    taken = [lease for lease in kept if lease.state is LeaseState.TAKEN]
    again = [
        replace(lease, round=last_round, stop=min(lease.stop, ends[lease.dataset_id]))
        for lease in dropped
        if lease.start < ends.get(lease.dataset_id, 0)
    ]
    # What stays taken goes first: a dropped piece of the same rows must not get them.
    for lease in (*sorted(taken, key=_place), *sorted(again, key=_place)):
        others = covered.setdefault(lease.dataset_id, [])
        for start, stop in _outside((lease.start, lease.stop), others):
            cut = cuts.get(lease.queue)
            unit = lease.unit if cut is None else cut.unit(start)
            _put(t, replace(lease, start=start, stop=stop, unit=unit, state=LeaseState.REOPENED))
            others.append((start, stop))


def _place(lease: LeaseRecord) -> Range:
    return lease.start, lease.stop


def _put(t: Transaction, lease: LeaseRecord) -> None:
    """Inserts the lease; a lease of the same key, such as the one it is a part of, is replaced."""
    values = rows.values(lease)
    key = {f"of_{column.name}": values[column.name] for column in _LEASES.primary_key}
    t.connection.change(_OF_LEASES.delete, key)
    t.connection.change(_OF_LEASES.insert, values)


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
