"""The life of a round: planned, open, frozen, published.

Owns which rounds are not published yet, who has rows of them, and the moves between their states.
When a round closes, who gets rows and which round takes a contribution is the strategy's answer.
The ledger is the truth; what is kept in memory is a copy of its unpublished rounds.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from atoll.clock import Clock
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds import leases, under_way
from atoll.coordinator.rounds.chances import Chances
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.leases import Deadlines
from atoll.coordinator.rounds.under_way import UnderWay
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    AnnouncementRecord,
    ContributionRecord,
    LeaseRecord,
    RoundPlan,
    RoundRecord,
    RoundState,
    SkipRecord,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import Lease, RoundView, Strategy
from atoll.versions.manifests import Manifests, Recorded
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Rounds:
    """The rounds that are not published, and the moves between their states.

    Thread-safe: moves are made under one lock; `under_way` and `newest` are replaced whole, so any
    thread may read them at any time.
    """

    ledger: Ledger
    registry: Registry
    clock: Clock
    manifests: Manifests
    layout: Layout

    def __post_init__(self) -> None:
        self.dispatch = Dispatch(self.ledger, self.manifests.newest.manifest)
        self._deadlines = Deadlines(self.clock)
        self._chances = Chances(self.clock)
        self._lock = threading.RLock()
        self._quorum_since: dict[int, float] = {}  # by open round: since when enough are in
        self._open_since: dict[int, float] = {}  # by open round, as far as this life knows
        self._announced: dict[Lease, AnnouncementRecord] = {}  # in this life; replaced whole
        self.newest: RoundRecord | None = None  # the last one that was planned, whatever its state
        self.under_way: tuple[UnderWay, ...] = ()  # not published, oldest first
        self._outliving: tuple[Lease, ...] = ()  # still to be used, of rounds that are published
        self.members: list[str] = []  # who was given rows of the newest round, in order
        with self.ledger.reading() as t:
            self.tokens = t.contributions.counted_tokens()
        self.refresh()

    def refresh(self) -> None:
        """Copies the unpublished rounds from the ledger."""
        with self._lock:
            with self.ledger.reading() as t:
                self.newest = newest = t.rounds.latest()
                given = [] if newest is None else t.leases.of_round(newest.round)
                self.members = sorted({lease.worker_id for lease in given})
                self.under_way = tuple(
                    UnderWay(
                        record,
                        tuple(t.leases.of_round(record.round)),
                        {(c.round, c.worker_id): c for c in t.contributions.of_round(record.round)},
                    )
                    for record in t.rounds.unpublished()
                )
                self._outliving = tuple((x.round, x.worker_id) for x in t.leases.outliving())
            begun = (r for r in self.under_way if not r.is_planned)
            self._deadlines.hold(
                {(r.number, worker) for r in begun for worker in r.holding} | {*self._outliving}
            )
            since, now = self._open_since, self.clock.now()
            self._open_since = {r.number: since.get(r.number, now) for r in self.open_rounds}
            self._chances.hold(self._open_since)
            # What it states of rows that it is given anew, were they the same, is no second
            # statement: so none outlives its lease.
            held = {(r.number, worker) for r in self.open_rounds for worker in r.holding}
            self._announced = {x: made for x, made in self._announced.items() if x in held}
            self._reach()

    def _reach(self) -> None:
        """Puts the newest round's manifest in force, or the next one's where another follows it."""
        newest = self.newest
        self.manifests.reach(1 if newest is None else newest.round + self._goes_on(newest))

    # What is asked about rounds

    @property
    def run_strategy(self) -> Strategy:
        """The strategy, for questions whose answer is the same in every round."""
        return self.manifests.run_strategy

    def strategy_of(self, round_number: int) -> Strategy:
        """The strategy of a round, under the manifest of that round."""
        return self.manifests.of_round(round_number).round_strategy

    def find(self, round_number: int) -> UnderWay | None:
        """The round of that number, while it is not published."""
        return next((r for r in self.under_way if r.number == round_number), None)

    @property
    def open_rounds(self) -> list[UnderWay]:
        """Rounds that take contributions, oldest first."""
        return [r for r in self.under_way if r.is_open]

    @property
    def frozen(self) -> int | None:
        """The oldest round that is closed and not published yet."""
        return next((r.number for r in self.under_way if r.record.state is RoundState.FROZEN), None)

    def record(self, round_number: int) -> RoundRecord:
        """The record of a round that was planned at some time."""
        found = self.find(round_number)
        if found is not None:
            return found.record
        with self.ledger.reading() as t:
            [record] = t.rounds.all(first=round_number, last=round_number)
        return record

    def destination(self, made_for: int) -> int | None:
        """The round that a contribution made for `made_for` goes to now; None: it is stale."""
        open_rounds = [r.number for r in self.open_rounds]
        return self.strategy_of(made_for).destination(made_for, open_rounds)

    def leased(self, round_number: int, worker_id: str) -> tuple[LeaseRecord, ...]:
        """The rows of a round that the worker has a lease of or has handed in, in order."""
        found = self.find(round_number)
        if found is not None:
            return found.ranges(worker_id)
        with self.ledger.reading() as t:
            return under_way.held(t.leases.of_round(round_number), worker_id)

    def was_leased(self, round_number: int, worker_id: str) -> bool:
        """Whether the worker was ever given rows of a round, whatever became of them."""
        with self.ledger.reading() as t:
            return any(x.worker_id == worker_id for x in t.leases.of_round(round_number))

    def contribution(self, round_number: int, worker_id: str) -> ContributionRecord | None:
        """What was accepted under this key, in any round."""
        found = self._made(round_number, worker_id)
        if found is not None or self.find(round_number) is not None:
            return found
        with self.ledger.reading() as t:
            return t.contributions.get(round_number, worker_id)

    def _made(self, round_number: int, worker_id: str) -> ContributionRecord | None:
        """What the worker made for a round, while the round that folds it is not published."""
        key = (round_number, worker_id)
        return next((r.contributions[key] for r in self.under_way if key in r.contributions), None)

    def next_of(self, worker_id: str, *, under_way: Collection[int] = ()) -> UnderWay | None:
        """The oldest open round that the worker has rows of and has handed in nothing for.

        Rounds `under_way` are those that it trains or hands in at the moment.
        """
        for found in self.open_rounds:
            is_begun = found.number in under_way
            is_made = self._made(found.number, worker_id) is not None
            if worker_id in found.holding and not is_begun and not is_made:
                return found
        return None

    def needed(self, round_number: int) -> int:
        """The version that an island must hold before it begins a round.

        After a round of the whole model none begins without it: it counts rows for every fragment,
        so whatever is trained after it sets out from there.
        """
        needed = self.strategy_of(round_number).needs(round_number)
        return max(needed, self.newest_whole(first=needed + 1, last=round_number - 1))

    def newest_whole(self, *, first: int, last: int) -> int:
        """The newest of these rounds that carries the whole model; 0: none does."""
        if first > last:
            return 0
        with self.ledger.reading() as t:
            return t.rounds.newest_whole(first=first, last=last)

    def oldest_held(self) -> dict[str, int]:
        """By worker: the oldest round that it has rows of and has handed in nothing for."""
        return {worker_id: number for number, worker_id in sorted(self._unused(), reverse=True)}

    def waiting_for(self) -> list[str]:
        """Live workers whose contribution the round that closes next lacks, in order."""
        closing = self._closes_next
        if closing is None:
            return []
        return sorted(self.strategy_of(closing.number).waiting_for(self._view(closing)))

    def is_finished(self) -> bool:
        """Whether the last round is published and none follows."""
        newest = self.newest
        if newest is None or newest.state is not RoundState.PUBLISHED:
            return False
        return self._ends_with(newest, self.tokens)

    def view(self, round_number: int) -> RoundView | None:
        """What the strategy may know about a round that is open; None where it is not."""
        found = self.find(round_number)
        return self._view(found) if found is not None and found.is_open else None

    def _view(self, seen: UnderWay) -> RoundView:
        number, live, now = seen.number, self.registry.live(), self.clock.now()
        older = {
            worker_id
            for made_for, worker_id in self._unused()
            if made_for < number and self.destination(made_for) == number
        }
        planned = seen.holding | older
        return RoundView(
            round=number,
            planned=planned,
            accepted=seen.accepted,
            live=live,
            ended=seen.ended,
            announced={worker_id for made_for, worker_id in self._announced if made_for == number},
            open_seconds=now - self._open_since.get(number, now),
        )

    def _unused(self) -> set[Lease]:
        """Leases that no contribution has used."""
        held = {(r.number, worker_id) for r in self.under_way for worker_id in r.holding}
        return held.union(self._outliving).difference(*(r.contributions for r in self.under_way))

    @property
    def _closes_next(self) -> UnderWay | None:
        """The oldest round, if it is open: rounds close in order."""
        return next((oldest for oldest in self.under_way[:1] if oldest.is_open), None)

    def _goes_on(self, record: RoundRecord) -> bool:
        """Whether a round follows the last published one because a new manifest moved the end."""
        published = record.state is RoundState.PUBLISHED
        return published and not self._ends_with(record, self.tokens)

    def _ends_with(self, planned: RoundRecord | RoundPlan, tokens: int) -> bool:
        """Whether no round follows one that is planned, after so many tokens of the run."""
        may_end = self.run_strategy.may_end(planned.fragment)
        return may_end and self._is_enough(planned.round, tokens)

    def _is_enough(self, round_number: int, tokens: int) -> bool:
        # Whether there is a next round is for the manifest to say that it would be under.
        stop = self.manifests.of_round(round_number + 1).manifest.stop
        return (0 < stop.rounds <= round_number) or (0 < stop.tokens <= tokens)

    # How rounds move

    def add_manifest(self, change: Callable[[Manifest], Manifest]) -> Recorded:
        """Records what `change` makes of the newest manifest, from the next round on.

        Under the lock that plans are made under: the round after the newest is planned either
        before this, and keeps its version, or after it. Nothing is recorded when nothing changes,
        and when the run cannot go on under the change, which is a ConfigError.
        """
        with self._lock:
            newest = self.manifests.newest
            changed = change(newest.manifest)
            if changed == newest.manifest:
                return newest
            self.manifests.record(self.ledger, changed, layout=self.layout)
            self._reach()
            return self.manifests.newest

    def admit(self) -> bool:
        """Begins rounds that none before has planned, and fills up those that are short.

        Called when a worker registers and on every tick, since a death can make a round short.
        Whether somebody was given rows, who may be waiting for some.
        """
        with self._lock:
            live = self.registry.live()
            if self.newest is None or self._goes_on(self.newest):
                return self._begin(sorted(live))
            numbers = [r.number for r in self.under_way if r.is_open or r.is_planned]
            return any([self._fill_up(number, live) for number in numbers])

    def _begin(self, live: list[str]) -> bool:
        """Begins the first rounds, or the next ones of a run that had come to its end before."""
        first = 1 if self.newest is None else self.newest.round + 1
        if len(live) < self.manifests.of_round(first).manifest.membership.min_workers:
            return False
        with self.ledger.writing() as t:
            t.rounds.begin(self._first_plans(t, first, live))
        self.refresh()
        return True

    def _first_plans(self, t: Transaction, first: int, live: list[str]) -> Iterator[RoundPlan]:
        """The rounds that are open from the start; each is planned when those before are in `t`."""
        tokens, cursor = self.tokens, self._cursor()
        for number in range(first, first + 1 + self.run_strategy.lead):
            plan = self._plan(t, number, live, cursor=cursor, tokens=tokens)
            yield plan
            cursor, tokens = plan.cursor, tokens + self.dispatch.tokens_of(plan.leases)
            if self._ends_with(plan, tokens):
                return

    def _fill_up(self, number: int, live: Iterable[str]) -> bool:
        """Gives rows of a round that is short to live workers that have none of it; whether any.

        First to those that never had some: one that loses them again and again must not keep the
        round from others.
        """
        found, is_given = self.find(number), False
        assert found is not None
        had = Counter(lease.worker_id for lease in found.leases)
        for worker_id in sorted(set(live) - found.holding, key=lambda name: (had[name], name)):
            found = self.find(number)
            if found is None or not self.strategy_of(number).is_short(self._view(found)):
                break  # on every tick, however many wait for the next round
            if not self._chances.has((number, worker_id)):
                continue
            with self.ledger.writing() as t:
                cursor, tokens = self._cursor(), found.record.tokens
                t.rounds.extend(self._plan(t, number, [worker_id], cursor=cursor, tokens=tokens))
            log.info("round extended", extra={"round": number, "worker": worker_id})
            self.refresh()
            is_given = True
        return is_given

    def give(self, worker_id: str, *, version: int) -> UnderWay | None:
        """Gives rows to an idle worker, which holds the newest version; the round, or None.

        What it was given of older versions and has not used it will not: that ends. None where the
        strategy gives no rows now.
        """
        if self.asked(worker_id, version) is None:
            return None  # without the lock: where rows come with the plan, everybody asks in vain
        with self._lock:
            number = self.asked(worker_id, version)
            if number is None or worker_id not in self.registry.live():
                return None
            found = self.find(number)
            assert found is not None, "only of an open round"
            if worker_id in found.holding:
                return self.next_of(worker_id)
            left = {lease for lease in self._unused() if lease[1] == worker_id}
            recorded = self.manifests.of_round(number)
            rows = {worker_id: self._piece(worker_id, recorded)}
            with self.ledger.writing() as t:
                # Before the end of what is left: rows that it reopens are given out later.
                plan = self._planned(
                    t, number, rows, recorded, cursor=self._cursor(), tokens=self.tokens
                )
                t.rounds.extend(plan)
                reissue = recorded.manifest.work.policy == "exactly_once"
                t.leases.end(left, reissue=reissue)
            self.refresh()
            return self.next_of(worker_id)

    def asked(self, worker_id: str, version: int) -> int | None:
        """The round of which an idle worker that holds the newest version is given rows now."""
        open_rounds = [r.number for r in self.open_rounds]
        folding = [r.number for r in self.under_way if worker_id in r.accepted]
        return self.run_strategy.asked(version, open_rounds, folding)

    def steps(self, worker_id: str) -> int:
        """How many inner steps the worker would be given if it asked now."""
        recorded = self.manifests.in_force
        return self._piece(worker_id, recorded) // recorded.manifest.inner.batch

    def _piece(self, worker_id: str, recorded: Recorded) -> int:
        """How many rows the worker is given when it asks now."""

        def speeds() -> dict[str, float]:
            told, live = self.registry.heartbeats.speeds(), self.registry.live()
            return {name: speed for name, speed in told.items() if name in live}

        return recorded.round_strategy.piece(worker_id, speeds)

    def _plan(
        self, t: Transaction, round_number: int, live: list[str], *, cursor: int, tokens: int
    ) -> RoundPlan:
        recorded = self.manifests.of_round(round_number)
        speeds = self.registry.heartbeats.speeds()
        rows = recorded.round_strategy.rows(round_number, live, speeds)
        return self._planned(t, round_number, rows, recorded, cursor=cursor, tokens=tokens)

    def _planned(
        self,
        t: Transaction,
        round_number: int,
        rows: Mapping[str, int],
        recorded: Recorded,
        *,
        cursor: int,
        tokens: int,
    ) -> RoundPlan:
        asked = recorded.round_strategy
        plan = self.dispatch.plan(t, round_number, rows, recorded, cursor=cursor, tokens=tokens)
        is_last = self._is_enough(round_number, tokens + self.dispatch.tokens_of(plan.leases))
        return replace(plan, fragment=asked.fragment(round_number, is_last=is_last))

    def accept(
        self,
        contribution: ContributionRecord,
        header: FrameHeader,
        announcement: AnnouncementRecord | None = None,
    ) -> ContributionRecord:
        """Records a validated contribution; returns the first one of its key.

        With it what was announced of it, where it was pulled.

        Under the same lock as `freeze`, so that the plan a freeze makes knows the whole set, and
        as `expire`: the leases that the header names are the ones that become done.
        """
        with self._lock:
            key = contribution.round, contribution.worker_id
            applied = self.destination(contribution.round)
            if self.contribution(*key) is None and applied is not None:
                leases.check_named(header, self.leased(*key))
                # The round that was to fold it may have frozen since it was checked.
                contribution = replace(contribution, applied=applied)
            with self.ledger.writing() as t:
                accepted = t.contributions.accept(contribution)
                if announcement is not None and accepted is contribution:
                    t.announcements.add(announcement)
            self.under_way = tuple(
                r.with_contribution(accepted) if r.number == accepted.applied else r
                for r in self.under_way
            )
            # Now: the thread that closes rounds may be computing one, and would look later.
            self._time_quorums()
            return accepted

    def announce(self, made: AnnouncementRecord) -> None:
        """A worker's contribution to an open round is ready to be pulled."""
        with self._lock:
            self._announced = {**self._announced, (made.round, made.worker_id): made}

    def announcement(self, round_number: int, worker_id: str) -> AnnouncementRecord | None:
        """What a worker has announced in this life, while the round is open and its lease holds."""
        return self._announced.get((round_number, worker_id))

    def skip(self, round_number: int, worker_id: str, *, reason: str, sentence: str) -> bool:
        """An open round goes on without the worker, whose rows are open again; with a record.

        False, and nothing is done, where the worker holds no rows of it or its contribution is in.
        """
        with self._lock:
            found = self.find(round_number)
            if found is None or not found.is_open or worker_id not in found.holding:
                return False
            if self.contribution(round_number, worker_id) is not None:
                return False
            work = self.manifests.of_round(round_number).manifest.work
            wall = self.clock.wall()
            with self.ledger.writing() as t:
                t.skips.add(round_number, worker_id, reason=reason, sentence=sentence, wall=wall)
                t.rounds.expire(round_number, [worker_id], reissue=work.policy == "exactly_once")
            self._chances.lost((round_number, worker_id))
            self.refresh()
            return True

    def skips(self, round_number: int) -> list[SkipRecord]:
        """What a round goes on without, or did."""
        with self.ledger.reading() as t:
            return t.skips.of_round(round_number)

    def expire(self) -> list[str]:
        """Ends the leases that were held for too long, and gives the workers that held them.

        Their rounds go on without them; what comes of them later is refused.
        """
        with self._lock:
            work = self.manifests.in_force.manifest.work
            if not work.lease_seconds:
                return []
            overdue = self._deadlines.overdue(lease_seconds=work.lease_seconds)
            late = [lease for lease in overdue if self.contribution(*lease) is None]
            if late:
                with self.ledger.writing() as t:
                    for number, ended in groupby(late, key=itemgetter(0)):
                        workers = [worker for _, worker in ended]
                        t.rounds.expire(number, workers, reissue=work.policy == "exactly_once")
                self.refresh()
            return sorted({worker for _, worker in late})

    def restart_deadlines(self) -> None:
        """Gives every lease, and every open round, its full time again.

        After a time in which nobody could use it.
        """
        with self._lock:
            self._deadlines.restart()
            self._open_since = dict.fromkeys(self._open_since, self.clock.now())

    def is_due(self) -> bool:
        """Whether the round that closes next closes now."""
        with self._lock:
            self._time_quorums()
            closing, now = self._closes_next, self.clock.now()
            if closing is None:
                return False
            held = now - self._quorum_since.get(closing.number, now)
            return self.strategy_of(closing.number).is_due(self._view(closing), seconds=held)

    def _time_quorums(self) -> None:
        """Since when each open round has had its quorum; a round that has lost it begins anew."""
        since, now = self._quorum_since, self.clock.now()
        self._quorum_since = {
            r.number: since.get(r.number, now)
            for r in self.open_rounds
            if self.strategy_of(r.number).has_quorum(self._view(r))
        }

    def freeze(self) -> int:
        """Fixes the ordered set of the round that closes next, and gives its number.

        In the same transaction the first round that is not planned yet is planned.
        """
        with self._lock:
            closing = self._closes_next
            assert closing is not None and self.newest is not None
            folded = sum(c.tokens for c in closing.contributions.values())
            # With a lead, rounds between the one that closes and the one that is planned are open.
            # Rows of leases that ended are trained on elsewhere, and counted there.
            between = (lease for r in self.under_way[1:] for lease in r.held)
            tokens = self.tokens + folded + self.dispatch.tokens_of(between)
            live = self.registry.live()
            unused = self._unused()
            strategy = self.strategy_of(closing.number)
            ended = strategy.ended(unused, closing=closing.number, live=live)
            policy = self.manifests.of_round(closing.number).manifest.work.policy
            with self.ledger.writing() as t:
                next_plan = None
                if not self._ends_with(self.newest, tokens):
                    # Before the freeze: rows that it reopens are given out from a later round on.
                    number, cursor = self.newest.round + 1, self._cursor()
                    next_plan = self._plan(t, number, sorted(live), cursor=cursor, tokens=tokens)
                elif closing.number == self.newest.round:
                    ended = unused  # no round is left to take what they would bring
                t.rounds.freeze(
                    closing.number, next_plan, ended=ended, reissue=policy == "exactly_once"
                )
            self.tokens += folded
            # From here on the round is closed for everybody who asks.
            self.refresh()
            return closing.number

    def _cursor(self) -> int:
        """How many rows were ever issued; a round that was extended late may know of the most."""
        known = [r.record.cursor for r in self.under_way]
        return max([*known, 0 if self.newest is None else self.newest.cursor])
