"""The rounds of a sharded run: the steps between two checkpoints, and the rows that they train.

A round is open from its plan to its checkpoint; its rows are leased in the name of the group's
first member, who holds them for all. The ledger is the truth; this is a copy of what is open.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    LeaseRecord,
    LeaseState,
    RankRecord,
    RoundPlan,
    RoundRecord,
    RoundState,
    SaveRecord,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.sharded import Interval
from atoll.strategies import registry
from atoll.strategies.sharded.strategy import Sharded
from atoll.versions.manifests import Manifests


@dataclass(frozen=True)
class Open:
    """The rounds that are not committed, with their rows; replaced whole, read by any thread."""

    newest: RoundRecord | None  # the last one that was planned, whatever its state
    committed: int  # the newest round whose checkpoint is recorded; 0: none
    tokens: int  # that are in the sums of the run, up to that checkpoint
    rounds: tuple[tuple[RoundRecord, tuple[LeaseRecord, ...]], ...]  # oldest first


@dataclass(eq=False)
class Intervals:
    """Which rounds are open and which rows they have. Thread-safe."""

    ledger: Ledger
    manifests: Manifests

    def __post_init__(self) -> None:
        self.dispatch = Dispatch(self.ledger, self.manifests.newest.manifest)
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Copies the open rounds from the ledger, and puts the manifest of the newest in force."""
        with self._lock:
            with self.ledger.reading() as t:
                newest, unpublished = t.rounds.latest(), t.rounds.unpublished()
                rounds = tuple((r, _held(t, r.round)) for r in unpublished)
                committed = 0 if newest is None else newest.round - len(rounds)
                tokens = t.checkpoints.tokens()
            self.open = Open(newest, committed, tokens, rounds)
            reached = 1 if newest is None else newest.round
            self.manifests.reach(reached + (newest is not None and self._goes_on(newest, tokens)))

    def strategy_of(self, round_number: int) -> Sharded:
        """The strategy of a round, under the manifest of that round."""
        return registry.sharded(self.manifests.of_round(round_number).manifest)

    @property
    def asked(self) -> Sharded:
        """The strategy, for questions whose answer is the same in every round."""
        return registry.sharded(self.manifests.first.manifest)

    # What is asked

    @property
    def committed(self) -> int:
        """The newest round whose checkpoint is recorded; 0: none."""
        return self.open.committed

    @property
    def next_commit(self) -> int:
        """The round whose checkpoint is recorded next."""
        return self.open.committed + 1

    def reachable(self, saves: Iterable[SaveRecord]) -> list[SaveRecord]:
        """Those of steps up to the end of the round whose checkpoint is recorded next.

        A group that began beyond it could not hand that round in any more.
        """
        _, last = self.asked.steps(self.next_commit)
        return [save for save in saves if save.step <= last]

    def find(self, round_number: int) -> Interval | None:
        """A round that is planned and not committed."""
        return next((i for i in self.intervals() if i.round == round_number), None)

    def intervals(self) -> tuple[Interval, ...]:
        """Rounds that are planned and not committed, oldest first."""
        return tuple(self._interval(record, leases) for record, leases in self.open.rounds)

    def is_finished(self) -> bool:
        """Whether the last round is committed and none follows."""
        newest = self.open.newest
        if newest is None or newest.state is not RoundState.PUBLISHED:
            return False
        return self._is_enough(newest.round, self.open.tokens)

    def tokens_at(self, step: int) -> int:
        """Tokens of the run up to a step of an open round, or of the newest committed one.

        Of open rounds as they are planned: who is late in them is known with their checkpoints.
        """
        number = self.asked.round_of(step)
        if number <= self.committed:
            return self.open.tokens
        earlier = [leases for record, leases in self.open.rounds if record.round < number]
        before = self.open.tokens + sum(map(self.dispatch.tokens_of, earlier))
        first, _ = self.asked.steps(number)
        manifest = self.manifests.of_round(number).manifest
        rows = (step - first + 1) * manifest.inner.batch
        return before + rows * int(manifest.data.identity["block"])

    def _interval(self, record: RoundRecord, leases: tuple[LeaseRecord, ...]) -> Interval:
        first, last = self.asked.steps(record.round)
        return Interval(
            round=record.round,
            first=first,
            last=last,
            ranges=tuple(lease.row_range for lease in leases),
            tokens=record.tokens,
            manifest_sha256=record.manifest_sha256,
        )

    # How rounds come and go; in a transaction of the caller, who calls `refresh` after it

    def hand_over(self, t: Transaction, holder: RankRecord) -> None:
        """A new group's first member takes over what is leased; begins rounds where none is."""
        t.leases.give_to(holder.worker_id, holder.incarnation)
        newest = t.rounds.latest()
        if newest is None or newest.state is RoundState.PUBLISHED:
            committed = 0 if newest is None else newest.round
            t.rounds.begin(self.plans(t, holder.worker_id, committed=committed))

    def plans(self, t: Transaction, holder: str, *, committed: int) -> Iterator[RoundPlan]:
        """What is planned once round `committed` is; each when those before it are in `t`."""
        last = committed + 1 + self.asked.lead
        newest = t.rounds.latest()
        reached, cursor = (0, 0) if newest is None else (newest.round, newest.cursor)
        under_way = [_held(t, number) for number in range(committed + 1, reached + 1)]
        tokens = t.checkpoints.tokens() + sum(map(self.dispatch.tokens_of, under_way))
        while reached < last and not (reached and self._is_enough(reached, tokens)):
            recorded = self.manifests.of_round(reached + 1)
            rows = {holder: self.strategy_of(reached + 1).rows_each}
            before = self._planned_before(t, reached + 1)
            plan = self.dispatch.plan(t, reached + 1, rows, recorded, cursor=cursor, tokens=before)
            yield plan
            reached, cursor = plan.round, plan.cursor
            tokens += self.dispatch.tokens_of(plan.leases)

    def _planned_before(self, t: Transaction, round_number: int) -> int:
        """Tokens of all steps before a round, which its learning rates start from.

        Those of late ranks count, too: a step's rate is a function of its number.
        """
        found = t.rounds.all(first=round_number - 1, last=round_number - 1)
        if not found:
            return 0
        rows = self.strategy_of(round_number - 1).rows_each
        return found[0].tokens + self.dispatch.tokens_in(rows)

    def _goes_on(self, newest: RoundRecord, tokens: int) -> bool:
        """Whether a round follows the last committed one because a new manifest moved the end."""
        is_last = newest.state is RoundState.PUBLISHED
        return is_last and not self._is_enough(newest.round, tokens)

    def _is_enough(self, round_number: int, tokens: int) -> bool:
        # Whether there is a next round is for the manifest to say that it would be under.
        stop = self.manifests.of_round(round_number + 1).manifest.stop
        return (0 < stop.rounds <= round_number) or (0 < stop.tokens <= tokens)


def _held(t: Transaction, round_number: int) -> tuple[LeaseRecord, ...]:
    """Leases of a round that are under way or done, in the order their rows are trained in."""
    held = (LeaseState.LEASED, LeaseState.DONE)
    return tuple(lease for lease in t.leases.of_round(round_number) if lease.state in held)
