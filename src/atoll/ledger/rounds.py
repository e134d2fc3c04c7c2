"""Statements that move a round through its life, and the leases with it."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from sqlalchemy import Connection, insert, select, update

from atoll.errors import StoreError, WrongRound
from atoll.ledger import contributions, members, queues, rows, schema
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    Published,
    RoundPlan,
    RoundRecord,
    RoundState,
)

FIRST_ROUND = 1


def begin(connection: Connection, plan: RoundPlan) -> None:
    """See `Ledger.begin`."""
    latest = latest_round(connection)
    if latest is not None and latest.state is not RoundState.PUBLISHED:
        raise StoreError(
            f"the ledger already has rounds up to {latest.round}, which is {latest.state.value}; "
            f"only the first one and one after the last are begun, others are planned by freezing "
            f"the one before"
        )
    expected = FIRST_ROUND if latest is None else latest.round + 1
    _insert(connection, plan, state=RoundState.OPEN, expected=expected)


def extend(connection: Connection, plan: RoundPlan) -> None:
    """See `Ledger.extend`."""
    latest = latest_round(connection)
    if latest is None:
        raise WrongRound("no round has begun, so there is none to add leases to; begin the first")
    if latest.state not in (RoundState.PLANNED, RoundState.OPEN):
        raise WrongRound(
            f"round {latest.round} is {latest.state.value}; leases are only added to a round that "
            f"is planned or open"
        )
    if plan.round != latest.round:
        raise WrongRound(
            f"the plan is for round {plan.round}; leases are added to round {latest.round}"
        )
    _give_out(connection, plan)
    table = schema.rounds
    connection.execute(
        update(table).where(table.c.round == latest.round).values(cursor=plan.cursor)
    )


def freeze(
    connection: Connection, round_number: int, next_plan: RoundPlan | None, *, reissue: bool
) -> list[ContributionRecord]:
    """See `Ledger.freeze`."""
    _move(connection, round_number, old=RoundState.OPEN, new=RoundState.FROZEN)
    # Accepting marks a worker's leases done, so what is still leased has no contribution.
    _end_leases(connection, round_number, None, reissue=reissue)
    if next_plan is not None:
        # After the reopening: the next plan may take rows that this round just lost.
        _insert(connection, next_plan, state=RoundState.PLANNED, expected=round_number + 1)
    return contributions.of_round(connection, round_number)


def expire(
    connection: Connection, round_number: int, workers: Collection[str], *, reissue: bool
) -> int:
    """See `Ledger.expire`."""
    latest = latest_round(connection)
    if latest is None or latest.round != round_number or latest.state is not RoundState.OPEN:
        raise WrongRound(f"round {round_number} is not open; only its leases can come to an end")
    return _end_leases(connection, round_number, workers, reissue=reissue)


def _end_leases(
    connection: Connection, round_number: int, workers: Collection[str] | None, *, reissue: bool
) -> int:
    """Ends the leases of a round that no contribution has made done; how many there were."""
    table = schema.leases
    ended = LeaseState.REOPENED if reissue else LeaseState.GIVEN_UP
    statement = (
        update(table)
        .where(table.c.round == round_number, table.c.state == LeaseState.LEASED.value)
        .values(state=ended.value)
    )
    if workers is not None:
        statement = statement.where(table.c.worker_id.in_(sorted(workers)))
    return connection.execute(statement).rowcount


def publish(connection: Connection, round_number: int, published: Published) -> None:
    """See `Ledger.publish`."""
    _move(connection, round_number, old=RoundState.FROZEN, new=RoundState.PUBLISHED)
    table = schema.rounds
    connection.execute(
        update(table).where(table.c.round == round_number).values(rows.values(published))
    )
    connection.execute(
        update(table)
        .where(table.c.round == round_number + 1, table.c.state == RoundState.PLANNED.value)
        .values(state=RoundState.OPEN.value)
    )


def _move(connection: Connection, round_number: int, *, old: RoundState, new: RoundState) -> None:
    table = schema.rounds
    found = connection.execute(
        select(table.c.state).where(table.c.round == round_number)
    ).scalar_one_or_none()
    if found != old.value:
        raise WrongRound(
            f"round {round_number} is {found or 'not in the ledger'}; "
            f"it becomes {new.value} only while it is {old.value}"
        )
    connection.execute(update(table).where(table.c.round == round_number).values(state=new.value))


def _insert(connection: Connection, plan: RoundPlan, *, state: RoundState, expected: int) -> None:
    if plan.round != expected:
        raise WrongRound(f"the plan is for round {plan.round}; the next one is round {expected}")
    record = RoundRecord(
        round=plan.round, state=state, manifest_sha256=plan.manifest_sha256, cursor=plan.cursor
    )
    connection.execute(insert(schema.rounds), rows.values(record))
    _give_out(connection, plan)


def _give_out(connection: Connection, plan: RoundPlan) -> None:
    _take(connection, plan.taken)
    _keep_reopened(connection, plan)
    queues.open_queues(connection, plan.queues)
    _add_leases(connection, plan.leases, round_number=plan.round)
    queues.mark_issued(connection, plan.leases)


def _keep_reopened(connection: Connection, plan: RoundPlan) -> None:
    for lease in plan.left:
        inside = any(
            (taken.round, taken.worker_id, taken.queue)
            == (lease.round, lease.worker_id, lease.queue)
            and taken.start < lease.start < lease.stop == taken.stop
            for taken in plan.taken
        )
        if not inside or lease.state is not LeaseState.REOPENED:
            raise StoreError(f"{lease!r} is not the reopened end of a lease that is taken")
    if plan.left:
        connection.execute(insert(schema.leases), [rows.values(lease) for lease in plan.left])


def _add_leases(
    connection: Connection, leases: Sequence[LeaseRecord], *, round_number: int
) -> None:
    for lease in leases:
        if lease.round != round_number or lease.state is not LeaseState.LEASED:
            raise StoreError(
                f"{lease!r} cannot be given out with round {round_number}; "
                f"a new lease is of that round and in state 'leased'"
            )
    # Written here, so that a lease belongs to the life that its worker has in this transaction.
    lives = {worker.worker_id: worker.incarnation for worker in members.workers(connection)}
    held = [replace(le, incarnation=lives.get(le.worker_id, le.incarnation)) for le in leases]
    if held:
        connection.execute(insert(schema.leases), [rows.values(lease) for lease in held])


def hand_over(connection: Connection, worker_id: str, incarnation: int) -> None:
    """A new life of a worker takes over its leases of rounds that are not frozen."""
    table = schema.leases
    # Only the latest can be: to look at the states of all would take longer with every round.
    latest = latest_round(connection)
    if latest is None or latest.state not in (RoundState.PLANNED, RoundState.OPEN):
        return
    connection.execute(
        update(table)
        .where(
            table.c.worker_id == worker_id,
            table.c.state == LeaseState.LEASED.value,
            table.c.round == latest.round,
        )
        .values(incarnation=incarnation, lease_epoch=table.c.lease_epoch + 1)
    )


def _take(connection: Connection, taken: Sequence[LeaseRecord]) -> None:
    table = schema.leases
    for lease in taken:
        moved = connection.execute(
            update(table)
            .where(
                table.c.round == lease.round,
                table.c.worker_id == lease.worker_id,
                table.c.dataset_id == lease.dataset_id,
                table.c.start == lease.start,
                table.c.stop == lease.stop,
                table.c.state == LeaseState.REOPENED.value,
            )
            .values(state=LeaseState.TAKEN.value)
        )
        # Otherwise the same rows would be given out twice.
        if moved.rowcount != 1:
            raise StoreError(
                f"{lease!r} is not among the reopened leases, so its rows cannot be given out again"
            )


def rounds(connection: Connection, *, first: int, last: int | None) -> list[RoundRecord]:
    """See `Ledger.rounds`."""
    table = schema.rounds
    statement = select(table).where(table.c.round >= first).order_by(table.c.round)
    if last is not None:
        statement = statement.where(table.c.round <= last)
    return [rows.round_(row) for row in connection.execute(statement)]


def latest_round(connection: Connection) -> RoundRecord | None:
    """See `Ledger.latest_round`."""
    statement = select(schema.rounds).order_by(schema.rounds.c.round.desc()).limit(1)
    row = connection.execute(statement).one_or_none()
    return None if row is None else rows.round_(row)


def leases(connection: Connection, round_number: int) -> list[LeaseRecord]:
    """See `Ledger.leases`."""
    table = schema.leases
    statement = (
        select(table)
        .where(table.c.round == round_number)
        .order_by(table.c.worker_id, table.c.dataset_id, table.c.start, table.c.lease_epoch)
    )
    return [rows.lease(row) for row in connection.execute(statement)]


def reopened(connection: Connection) -> list[LeaseRecord]:
    """See `Ledger.reopened`."""
    table = schema.leases
    statement = (
        select(table)
        .where(table.c.state == LeaseState.REOPENED.value)
        .order_by(table.c.round, table.c.dataset_id, table.c.start, table.c.worker_id)
    )
    return [rows.lease(row) for row in connection.execute(statement)]
