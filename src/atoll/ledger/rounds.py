"""Statements that move a round through its life, and the leases with it."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from sqlalchemy import Connection, bindparam, insert, select, update

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

_TABLE = schema.rounds
_IS_ROUND = _TABLE.c.round == bindparam("of_round")
_LATEST = select(_TABLE).order_by(_TABLE.c.round.desc()).limit(1)
_FROM = select(_TABLE).where(_TABLE.c.round >= bindparam("first")).order_by(_TABLE.c.round)
_FROM_TO = _FROM.where(_TABLE.c.round <= bindparam("last"))
_STATE = select(_TABLE.c.state).where(_IS_ROUND)
_INSERT = insert(_TABLE)
_UPDATE = update(_TABLE).where(_IS_ROUND)
_OPEN_PLANNED = (
    update(_TABLE)
    .where(_IS_ROUND, _TABLE.c.state == RoundState.PLANNED.value)
    .values(state=RoundState.OPEN.value)
)

_LEASES = schema.leases
_IN_ROUND = _LEASES.c.round == bindparam("in_round")
_OF_WORKER = _LEASES.c.worker_id == bindparam("of_worker")
_IS_LEASED = _LEASES.c.state == LeaseState.LEASED.value
_IS_REOPENED = _LEASES.c.state == LeaseState.REOPENED.value
_INSERT_LEASES = insert(_LEASES)
_LEASES_OF_ROUND = (
    select(_LEASES)
    .where(_IN_ROUND)
    .order_by(_LEASES.c.worker_id, _LEASES.c.dataset_id, _LEASES.c.start, _LEASES.c.lease_epoch)
)
_REOPENED = (
    select(_LEASES)
    .where(_IS_REOPENED)
    .order_by(_LEASES.c.round, _LEASES.c.dataset_id, _LEASES.c.start, _LEASES.c.worker_id)
)
_END_LEASES = update(_LEASES).where(_IN_ROUND, _IS_LEASED)
_END_LEASES_OF = _END_LEASES.where(_LEASES.c.worker_id.in_(bindparam("workers", expanding=True)))
_HAND_OVER = (
    update(_LEASES)
    .where(_IN_ROUND, _OF_WORKER, _IS_LEASED)
    .values(incarnation=bindparam("to_life"), lease_epoch=_LEASES.c.lease_epoch + 1)
)
_TAKE = (
    update(_LEASES)
    .where(
        _IN_ROUND,
        _OF_WORKER,
        _LEASES.c.dataset_id == bindparam("of_dataset"),
        _LEASES.c.start == bindparam("from_row"),
        _LEASES.c.stop == bindparam("to_row"),
        _IS_REOPENED,
    )
    .values(state=LeaseState.TAKEN.value)
)


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
    connection.execute(_UPDATE, {"of_round": latest.round, "cursor": plan.cursor})


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
    ended = LeaseState.REOPENED if reissue else LeaseState.GIVEN_UP
    values = {"in_round": round_number, "state": ended.value}
    if workers is None:
        return connection.execute(_END_LEASES, values).rowcount
    return connection.execute(_END_LEASES_OF, {**values, "workers": sorted(workers)}).rowcount


def publish(connection: Connection, round_number: int, published: Published) -> None:
    """See `Ledger.publish`."""
    _move(connection, round_number, old=RoundState.FROZEN, new=RoundState.PUBLISHED)
    connection.execute(_UPDATE, {"of_round": round_number, **rows.values(published)})
    connection.execute(_OPEN_PLANNED, {"of_round": round_number + 1})


def _move(connection: Connection, round_number: int, *, old: RoundState, new: RoundState) -> None:
    found = connection.execute(_STATE, {"of_round": round_number}).scalar_one_or_none()
    if found != old.value:
        raise WrongRound(
            f"round {round_number} is {found or 'not in the ledger'}; "
            f"it becomes {new.value} only while it is {old.value}"
        )
    connection.execute(_UPDATE, {"of_round": round_number, "state": new.value})


def _insert(connection: Connection, plan: RoundPlan, *, state: RoundState, expected: int) -> None:
    if plan.round != expected:
        raise WrongRound(f"the plan is for round {plan.round}; the next one is round {expected}")
    record = RoundRecord(
        round=plan.round, state=state, manifest_sha256=plan.manifest_sha256, cursor=plan.cursor
    )
    connection.execute(_INSERT, rows.values(record))
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
        connection.execute(_INSERT_LEASES, [rows.values(lease) for lease in plan.left])


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
        connection.execute(_INSERT_LEASES, [rows.values(lease) for lease in held])


def hand_over(connection: Connection, worker_id: str, incarnation: int) -> None:
    """A new life of a worker takes over its leases of rounds that are not frozen."""
    # Only the latest can be: to look at the states of all would take longer with every round.
    latest = latest_round(connection)
    if latest is None or latest.state not in (RoundState.PLANNED, RoundState.OPEN):
        return
    connection.execute(
        _HAND_OVER,
        {"in_round": latest.round, "of_worker": worker_id, "to_life": incarnation},
    )


def _take(connection: Connection, taken: Sequence[LeaseRecord]) -> None:
    for lease in taken:
        moved = connection.execute(
            _TAKE,
            {
                "in_round": lease.round,
                "of_worker": lease.worker_id,
                "of_dataset": lease.dataset_id,
                "from_row": lease.start,
                "to_row": lease.stop,
            },
        )
        # Otherwise the same rows would be given out twice.
        if moved.rowcount != 1:
            raise StoreError(
                f"{lease!r} is not among the reopened leases, so its rows cannot be given out again"
            )


def rounds(connection: Connection, *, first: int, last: int | None) -> list[RoundRecord]:
    """See `Ledger.rounds`."""
    if last is None:
        found = connection.execute(_FROM, {"first": first})
    else:
        found = connection.execute(_FROM_TO, {"first": first, "last": last})
    return [rows.round_(row) for row in found]


def latest_round(connection: Connection) -> RoundRecord | None:
    """See `Ledger.latest_round`."""
    row = connection.execute(_LATEST).one_or_none()
    return None if row is None else rows.round_(row)


def leases(connection: Connection, round_number: int) -> list[LeaseRecord]:
    """See `Ledger.leases`."""
    found = connection.execute(_LEASES_OF_ROUND, {"in_round": round_number})
    return [rows.lease(row) for row in found]


def reopened(connection: Connection) -> list[LeaseRecord]:
    """See `Ledger.reopened`."""
    return [rows.lease(row) for row in connection.execute(_REOPENED)]
