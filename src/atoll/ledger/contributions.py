"""Statements that accept a contribution, once, and list what was accepted."""

from collections.abc import Generator

from sqlalchemy import Connection, bindparam, func, insert, select, update

from atoll.errors import Conflict, LeaseLost, StaleContribution, WrongRound
from atoll.ledger import members, queues, rows, schema
from atoll.ledger.records import ContributionRecord, LeaseState, RoundState

_TABLE, _ROUNDS, _LEASES = schema.contributions, schema.rounds, schema.leases
_INSERT = insert(_TABLE)
_IN_ROUND = _TABLE.c.round == bindparam("in_round")
_OF_ROUND = select(_TABLE).where(_IN_ROUND).order_by(_TABLE.c.worker_id)
_FIND = select(_TABLE).where(_IN_ROUND, _TABLE.c.worker_id == bindparam("of_worker"))
_STATE = select(_ROUNDS.c.state).where(_ROUNDS.c.round == bindparam("of_round"))
_BLOBS = select(_TABLE.c.sha256).where(_TABLE.c.round >= bindparam("first"))
_EVERY = select(_TABLE).order_by(_TABLE.c.round, _TABLE.c.worker_id)
_COUNTED_TOKENS = (
    select(func.coalesce(func.sum(_TABLE.c.tokens), 0))
    .join(_ROUNDS, _ROUNDS.c.round == _TABLE.c.round)
    .where(_ROUNDS.c.state.in_((RoundState.FROZEN.value, RoundState.PUBLISHED.value)))
)
_HELD = (
    _LEASES.c.round == bindparam("in_round"),
    _LEASES.c.worker_id == bindparam("of_worker"),
    _LEASES.c.incarnation == bindparam("of_life"),
    _LEASES.c.state == LeaseState.LEASED.value,
)
_HELD_LEASES = select(_LEASES).where(*_HELD)
_FINISH_LEASES = update(_LEASES).where(*_HELD).values(state=LeaseState.DONE.value)
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
    connection.execute(_INSERT, rows.values(contribution))
    return contribution


def of_round(connection: Connection, round_number: int) -> list[ContributionRecord]:
    """See `Ledger.contributions`."""
    found = connection.execute(_OF_ROUND, {"in_round": round_number})
    return [rows.contribution(row) for row in found]


def every(connection: Connection) -> Generator[ContributionRecord, None, None]:
    """See `Ledger.every_contribution`."""
    with connection.execute(_EVERY.execution_options(yield_per=BATCH)) as found:
        for row in found:
            yield rows.contribution(row)


def counted_tokens(connection: Connection) -> int:
    """See `Ledger.counted_tokens`."""
    return int(connection.execute(_COUNTED_TOKENS).scalar_one())


def accepted_blobs(connection: Connection, *, first: int) -> set[str]:
    """See `Ledger.accepted_blobs`."""
    return set(connection.execute(_BLOBS, {"first": first}).scalars())


def _state_of(connection: Connection, round_number: int) -> RoundState:
    state = connection.execute(_STATE, {"of_round": round_number}).scalar_one_or_none()
    if state is None:
        raise WrongRound(
            f"round {round_number} is not in the ledger; ask the coordinator which one is open"
        )
    return RoundState(state)


def _find(connection: Connection, key: ContributionRecord) -> ContributionRecord | None:
    at = {"in_round": key.round, "of_worker": key.worker_id}
    row = connection.execute(_FIND, at).one_or_none()
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
    held = {
        "in_round": contribution.round,
        "of_worker": contribution.worker_id,
        "of_life": contribution.incarnation,
    }
    leases = [rows.lease(row) for row in connection.execute(_HELD_LEASES, held)]
    connection.execute(_FINISH_LEASES, held)
    queues.mark_done(connection, leases)
    if not leases:
        raise LeaseLost(
            f"worker_id={contribution.worker_id!r} has no lease in round {contribution.round}; "
            f"only leased rows are contributed, so wait for the next plan"
        )
