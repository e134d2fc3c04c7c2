"""Statements that accept a contribution, once, and list what was accepted."""

from collections.abc import Generator

from sqlalchemy import Connection, func, insert, select, update

from atoll.errors import Conflict, LeaseLost, StaleContribution, WrongRound
from atoll.ledger import members, queues, rows, schema
from atoll.ledger.records import ContributionRecord, LeaseState, RoundState

# Rows held in memory at a time.
BATCH = 500


def accept(connection: Connection, contribution: ContributionRecord) -> ContributionRecord:
    """See `Ledger.accept`, which also fixes the order of the checks."""
    members.check_incarnation(connection, contribution.worker_id, contribution.incarnation)
    state = _state_of(connection, contribution.round)
    first = _find(connection, contribution)
    if first is not None:
        return _same(first, contribution)
    _check_open(contribution, state)
    _finish_leases(connection, contribution)
    connection.execute(insert(schema.contributions), rows.values(contribution))
    return contribution


def of_round(connection: Connection, round_number: int) -> list[ContributionRecord]:
    """See `Ledger.contributions`."""
    table = schema.contributions
    statement = select(table).where(table.c.round == round_number).order_by(table.c.worker_id)
    return [rows.contribution(row) for row in connection.execute(statement)]


def every(connection: Connection) -> Generator[ContributionRecord, None, None]:
    """See `Ledger.every_contribution`."""
    table = schema.contributions
    statement = select(table).order_by(table.c.round, table.c.worker_id)
    with connection.execute(statement.execution_options(yield_per=BATCH)) as found:
        for row in found:
            yield rows.contribution(row)


def counted_tokens(connection: Connection) -> int:
    """See `Ledger.counted_tokens`."""
    table, of = schema.contributions, schema.rounds
    closed = (RoundState.FROZEN.value, RoundState.PUBLISHED.value)
    statement = (
        select(func.coalesce(func.sum(table.c.tokens), 0))
        .join(of, of.c.round == table.c.round)
        .where(of.c.state.in_(closed))
    )
    return int(connection.execute(statement).scalar_one())


def accepted_blobs(connection: Connection, *, first: int) -> set[str]:
    """See `Ledger.accepted_blobs`."""
    table = schema.contributions
    statement = select(table.c.sha256).where(table.c.round >= first)
    return set(connection.execute(statement).scalars())


def _state_of(connection: Connection, round_number: int) -> RoundState:
    statement = select(schema.rounds.c.state).where(schema.rounds.c.round == round_number)
    state = connection.execute(statement).scalar_one_or_none()
    if state is None:
        raise WrongRound(
            f"round {round_number} is not in the ledger; ask the coordinator which one is open"
        )
    return RoundState(state)


def _find(connection: Connection, key: ContributionRecord) -> ContributionRecord | None:
    table = schema.contributions
    statement = select(table).where(table.c.round == key.round, table.c.worker_id == key.worker_id)
    row = connection.execute(statement).one_or_none()
    return None if row is None else rows.contribution(row)


def _same(first: ContributionRecord, again: ContributionRecord) -> ContributionRecord:
    if first.sha256 != again.sha256:
        raise Conflict(
            f"worker_id={again.worker_id!r} already contributed {first.sha256!r} to round "
            f"{again.round}, and now sends {again.sha256!r}; the first one stands"
        )
    return first


def _check_open(contribution: ContributionRecord, state: RoundState) -> None:
    if state in (RoundState.FROZEN, RoundState.PUBLISHED):
        raise StaleContribution(
            f"round {contribution.round} is {state.value} without worker_id="
            f"{contribution.worker_id!r}; its rows are open again, go on from the new version"
        )
    if state is RoundState.PLANNED:
        raise WrongRound(
            f"round {contribution.round} is only planned; contribute once the round before it "
            f"is published"
        )


def _finish_leases(connection: Connection, contribution: ContributionRecord) -> None:
    table = schema.leases
    held = (
        table.c.round == contribution.round,
        table.c.worker_id == contribution.worker_id,
        table.c.incarnation == contribution.incarnation,
        table.c.state == LeaseState.LEASED.value,
    )
    leases = [rows.lease(row) for row in connection.execute(select(table).where(*held))]
    connection.execute(update(table).where(*held).values(state=LeaseState.DONE.value))
    queues.mark_done(connection, leases)
    if not leases:
        raise LeaseLost(
            f"worker_id={contribution.worker_id!r} has no lease in round {contribution.round}; "
            f"only leased rows are contributed, so wait for the next plan"
        )
