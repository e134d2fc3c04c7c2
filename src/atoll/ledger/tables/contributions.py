"""Accepted contributions: taken in once, listed by the round that folds them."""

from collections.abc import Generator
from dataclasses import dataclass

from sqlalchemy import bindparam, func, select

from atoll.errors import Conflict, StaleContribution, WrongRound
from atoll.ledger.records import ContributionRecord, RoundState, RoundTotals
from atoll.ledger.tables import schema
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.table import RecordTable

_TABLE, _ROUNDS = schema.contributions, schema.rounds
# The canonical order of the fold.
_ORDER = (_TABLE.c.applied, _TABLE.c.worker_id, _TABLE.c.round)
_OF_ROUND = select(_TABLE).where(_TABLE.c.applied == bindparam("by_round")).order_by(*_ORDER)
_EVERY = select(_TABLE).order_by(*_ORDER)
_STATE = select(_ROUNDS.c.state).where(_ROUNDS.c.round == bindparam("of_round"))
_BLOBS = select(_TABLE.c.sha256).where(_TABLE.c.applied >= bindparam("first"))
_COUNTED_TOKENS = (
    select(func.coalesce(func.sum(_TABLE.c.tokens), 0))
    .join(_ROUNDS, _ROUNDS.c.round == _TABLE.c.applied)
    .where(_ROUNDS.c.state.in_((RoundState.FROZEN.value, RoundState.PUBLISHED.value)))
)
_FOLDED = select(func.count()).select_from(_TABLE).where(_TABLE.c.applied <= bindparam("last"))
_TOTALS = (
    select(
        _TABLE.c.applied,
        func.count(),
        func.sum(_TABLE.c.tokens),
        func.sum(_TABLE.c.loss_sum),
        func.max(_TABLE.c.applied - _TABLE.c.round),
    )
    .where(_TABLE.c.applied >= bindparam("first"), _TABLE.c.applied <= bindparam("last"))
    .group_by(_TABLE.c.applied)
)


@dataclass
class ContributionTable(RecordTable):
    """What was accepted, each once under its key: the round it was made for, and the worker."""

    _members: MemberTable
    _leases: LeaseTable

    def accept(self, contribution: ContributionRecord) -> ContributionRecord:
        """Inserts the contribution and marks its leases done, with the units that are whole now.

        Checks, in this order: the worker exists (UnknownWorker), the incarnation is its latest
        (Fenced), the round it was made for exists (WrongRound). The same sha256 under the same key
        returns the first record, whatever its round's state; another sha256 is Conflict. A round to
        fold it that is frozen or published without it is StaleContribution; one that is only
        planned is WrongRound; a worker without a lease in the round that it was made for, in this
        life, is LeaseLost.
        """
        number, worker_id = contribution.round, contribution.worker_id
        self._members.check_incarnation(worker_id, contribution.incarnation)
        self._state_of(number)
        first = self.get(number, worker_id)
        if first is not None:
            if first.sha256 == contribution.sha256:
                return first
            known = f"worker_id={worker_id!r} already contributed {first.sha256!r}"
            again = f"to round {number}, and now sends {contribution.sha256!r}"
            raise Conflict(f"{known} {again}; the first one stands")
        _check_open(contribution, self._state_of(contribution.applied))
        self._leases.finish(number, worker_id, contribution.incarnation)
        self._add(contribution)
        return contribution

    def get(self, round_number: int, worker_id: str) -> ContributionRecord | None:
        """What this worker made for the round, if it was accepted."""
        return self._find(ContributionRecord, round_number, worker_id)

    def of_round(self, round_number: int) -> list[ContributionRecord]:
        """What the round folds, in the order of the fold: by worker_id, then by round made for."""
        return self._records(ContributionRecord, _OF_ROUND, {"by_round": round_number})

    def every(self) -> Generator[ContributionRecord, None, None]:
        """All contributions, round by round in the order of the fold; read as they are used."""
        return (ContributionRecord(*row) for row in self._connection.stream(_EVERY))

    def folded(self, *, last: int) -> int:
        """How many contributions the rounds up to `last` fold."""
        return int(self._connection.value(_FOLDED, {"last": last}))

    def counted_tokens(self) -> int:
        """Tokens in what every frozen and published round folds."""
        return int(self._connection.value(_COUNTED_TOKENS))

    def totals(self, *, first: int, last: int) -> dict[int, RoundTotals]:
        """By round, what it folds in sum; a round that folds nothing is left out."""
        found = self._connection.rows(_TOTALS, {"first": first, "last": last})
        return {
            number: RoundTotals(int(count), int(tokens), float(loss_sum), int(staleness))
            for number, count, tokens, loss_sum, staleness in found
        }

    def blobs(self, *, first: int = 1) -> set[str]:
        """Names of the blobs that round `first` and later ones fold."""
        return {sha256 for [sha256] in self._connection.rows(_BLOBS, {"first": first})}

    def _state_of(self, round_number: int) -> RoundState:
        state = self._connection.value(_STATE, {"of_round": round_number})
        if state is None:
            way_out = "ask the coordinator which one is open"
            raise WrongRound(f"round {round_number} is not in the ledger; {way_out}")
        return RoundState(state)


def _check_open(contribution: ContributionRecord, state: RoundState) -> None:
    number = contribution.applied
    if state in (RoundState.FROZEN, RoundState.PUBLISHED):
        late = f"round {number} is {state.value} without worker_id={contribution.worker_id!r}"
        raise StaleContribution(f"{late}; its rows are open again, go on from the new version")
    if state is RoundState.PLANNED:
        rule = "contribute once the round before it is published"
        raise WrongRound(f"round {number} is only planned; {rule}")
