"""Rounds and the moves between their states.

Several may be unpublished at once: those that follow the newest published one. They are frozen and
published in the order of their numbers.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import bindparam, select, update

from atoll.errors import StoreError, WrongRound
from atoll.ledger.records import ContributionRecord, Published, RoundPlan, RoundRecord, RoundState
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.leases import Key, LeaseTable
from atoll.ledger.tables.table import RecordTable

FIRST_ROUND = 1
ALL = -1  # in place of a fragment's number
NO_LIMIT = 2**63 - 1  # the highest number that a ledger can hold

_TABLE = schema.rounds
_LATEST = select(_TABLE).order_by(_TABLE.c.round.desc()).limit(1)
_NOT_BEFORE = _TABLE.c.round >= bindparam("first")
_NOT_AFTER = _TABLE.c.round <= bindparam("last")
_FROM_TO = select(_TABLE).where(_NOT_BEFORE, _NOT_AFTER).order_by(_TABLE.c.round)
_PUBLISHED = schema.newest_round(RoundState.PUBLISHED)
_UNPUBLISHED = select(_TABLE).where(_TABLE.c.round > _PUBLISHED).order_by(_TABLE.c.round)
_STATE = select(_TABLE.c.state).where(_TABLE.c.round == bindparam("of_round"))
_FRAGMENT = select(_TABLE.c.fragment).where(_TABLE.c.round == bindparam("of_round"))
_MOVED = (
    select(_TABLE.c.round)
    .where(_TABLE.c.fragment.in_((bindparam("carried"), bindparam("whole"))), _NOT_AFTER)
    .order_by(_TABLE.c.round.desc())
    .limit(1)
)
_WHOLE = (
    select(_TABLE.c.round)
    .where(_TABLE.c.fragment == bindparam("whole"), _NOT_BEFORE, _NOT_AFTER)
    .order_by(_TABLE.c.round.desc())
    .limit(1)
)
_UPDATE = schema.STATEMENTS[_TABLE.name].update
_MOVE_CURSOR = update(_TABLE).where(_NOT_BEFORE).values(cursor=bindparam("new_cursor"))


@dataclass
class RoundTable(RecordTable):
    """Every round of the run."""

    _leases: LeaseTable
    _contributions: ContributionTable

    def all(self, *, first: int = FIRST_ROUND, last: int = NO_LIMIT) -> list[RoundRecord]:
        """Rounds `first` to `last`, oldest first."""
        return self._records(RoundRecord, _FROM_TO, {"first": first, "last": last})

    def latest(self) -> RoundRecord | None:
        """The round of the highest number, whatever its state."""
        return self._record(RoundRecord, _LATEST)

    def unpublished(self) -> list[RoundRecord]:
        """Rounds that are not published, oldest first."""
        return self._records(RoundRecord, _UNPUBLISHED)

    def fragment(self, round_number: int) -> int:
        """Which fragment a round carries, as it was planned; -1: all. WrongRound without a plan."""
        found = self._connection.value(_FRAGMENT, {"of_round": round_number})
        if found is None:
            raise WrongRound(f"round {round_number} is not planned; ask for a round that is")
        return int(found)

    def newest_of(self, fragment: int, *, last: int) -> int:
        """The newest round up to `last` that carries the fragment; 0: none does.

        For -1, all of them, it is the newest round whatever it carries.
        """
        if fragment == ALL:
            return last
        wanted = {"carried": fragment, "whole": ALL, "last": last}
        return int(self._connection.value(_MOVED, wanted) or 0)

    def newest_whole(self, *, first: int, last: int) -> int:
        """The newest of rounds `first` to `last` that carries all fragments; 0: none does."""
        return int(
            self._connection.value(_WHOLE, {"whole": ALL, "first": first, "last": last}) or 0
        )

    def begin(self, plans: Iterable[RoundPlan]) -> None:
        """Inserts rounds that no freeze has planned, open, with their leases.

        The first ones, or those after a published round that was to be the last; StoreError when
        the latest round is not published. Each plan is taken when those before it are in.
        """
        latest = self.latest()
        if latest is not None and latest.state is not RoundState.PUBLISHED:
            has = f"the ledger already has rounds up to {latest.round}, which is"
            rule = "only the first ones and those after the last are begun, a freeze plans others"
            raise StoreError(f"{has} {latest.state.value}; {rule}")
        for plan in plans:
            self._insert(plan, RoundState.OPEN)

    def extend(self, plan: RoundPlan) -> None:
        """Adds the plan's leases to its round, planned or open; moves the cursor.

        The tokens that the round's learning rate starts from are the plan's from now on.
        """
        state = self._state(plan.round)
        if state not in (RoundState.PLANNED, RoundState.OPEN):
            rule = "leases are only added to a round that is planned or open"
            raise WrongRound(f"round {plan.round} is {_told(state)}; {rule}")
        self._leases.give_out(plan)
        # A round counts the rows of all plans up to its own, so later ones count these too.
        self._connection.change(_MOVE_CURSOR, {"first": plan.round, "new_cursor": plan.cursor})
        self._connection.change(_UPDATE, {"of_round": plan.round, "tokens": plan.tokens})

    def expire(self, round_number: int, workers: Collection[str], *, reissue: bool = True) -> int:
        """Ends what these workers still have leased in a round; how many leases there were.

        They become `reopened`, or without `reissue` `given_up`. WrongRound before it is open: no
        time runs yet. Of a closed one nothing is left where leases end with their round.
        """
        state = self._state(round_number)
        if state in (None, RoundState.PLANNED):
            rule = "leases end only in one that is or was open"
            raise WrongRound(f"round {round_number} is {_told(state)}; {rule}")
        return self._leases.end([(round_number, worker) for worker in workers], reissue=reissue)

    def freeze(
        self,
        round_number: int,
        plan: RoundPlan | None,
        *,
        ended: Collection[Key],
        reissue: bool = True,
    ) -> list[ContributionRecord]:
        """Fixes the ordered set of an open round and plans the next one, in one transaction.

        What is still leased under the keys `ended` (round, worker_id) becomes `reopened`, or
        without `reissue` `given_up`; `plan.taken` becomes `taken` (what is `left` of one stays
        reopened); the planned round follows the latest one. WrongRound unless the round is open and
        the one before it is frozen or published.
        """
        self._move(round_number, old=RoundState.OPEN, new=RoundState.FROZEN)
        self._check_before(round_number, RoundState.FROZEN, RoundState.PUBLISHED)
        self._leases.end(ended, reissue=reissue)
        if plan is not None:
            # After the reopening: the plan may take rows that this freeze just reopened.
            self._insert(plan, RoundState.PLANNED)
        return self._contributions.of_round(round_number)

    def publish(
        self, round_number: int, published: Published, *, opens: Collection[int] = ()
    ) -> None:
        """Records a frozen round's digests and opens the planned rounds that are named.

        WrongRound unless the round before it is published.
        """
        self._move(round_number, old=RoundState.FROZEN, new=RoundState.PUBLISHED)
        self._check_before(round_number, RoundState.PUBLISHED)
        self._connection.change(_UPDATE, {"of_round": round_number, **rows.values(published)})
        for number in opens:
            self._move(number, old=RoundState.PLANNED, new=RoundState.OPEN)

    def checkpoint(
        self, round_number: int, published: Published, *, plans: Iterable[RoundPlan]
    ) -> None:
        """Publishes an open round that no contributions are folded in, and opens those of `plans`.

        WrongRound unless the round before it is published.
        """
        self._move(round_number, old=RoundState.OPEN, new=RoundState.PUBLISHED)
        self._check_before(round_number, RoundState.PUBLISHED)
        self._connection.change(_UPDATE, {"of_round": round_number, **rows.values(published)})
        for plan in plans:
            self._insert(plan, RoundState.OPEN)

    def _state(self, round_number: int) -> RoundState | None:
        found = self._connection.value(_STATE, {"of_round": round_number})
        return None if found is None else RoundState(found)

    def _move(self, round_number: int, *, old: RoundState, new: RoundState) -> None:
        found = self._state(round_number)
        if found is not old:
            rule = f"it becomes {new.value} only while it is {old.value}"
            raise WrongRound(f"round {round_number} is {_told(found)}; {rule}")
        self._connection.change(_UPDATE, {"of_round": round_number, "state": new.value})

    def _check_before(self, round_number: int, *states: RoundState) -> None:
        if round_number == FIRST_ROUND:
            return
        before = self._state(round_number - 1)
        if before not in states:
            rule = "rounds are frozen and published in the order of their numbers"
            told = f"round {round_number - 1} is {_told(before)}; {rule}"
            raise WrongRound(f"{told}, so it comes before round {round_number}")

    def _insert(self, plan: RoundPlan, state: RoundState) -> None:
        latest = self.latest()
        following = FIRST_ROUND if latest is None else latest.round + 1
        if plan.round != following:
            given = f"the plan is for round {plan.round}"
            raise WrongRound(f"{given}; the next one is round {following}")
        manifest, cursor = plan.manifest_sha256, plan.cursor
        self._add(RoundRecord(plan.round, state, manifest, cursor, plan.fragment, plan.tokens))
        self._leases.give_out(plan)


def _told(state: RoundState | None) -> str:
    return "not in the ledger" if state is None else state.value
