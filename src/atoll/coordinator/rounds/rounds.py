"""The life of a round: planned, open, frozen, published.

Owns which rows and workers belong to the latest round and when it closes. The ledger is the truth;
what is kept in memory is a copy of its latest round.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.clock import Clock
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds import leases, quorum
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.leases import Deadlines
from atoll.coordinator.rounds.quorum import RoundView
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    RoundPlan,
    RoundRecord,
    RoundState,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import Manifest
from atoll.versions import manifests as versions
from atoll.versions.manifests import Manifests, Recorded
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatestRound:
    """A copy of the ledger's latest round. Never changed: a new one takes its place."""

    record: RoundRecord
    leases: tuple[LeaseRecord, ...]
    contributions: dict[str, ContributionRecord]

    @property
    def planned(self) -> frozenset[str]:
        return frozenset(lease.worker_id for lease in self.leases)

    @property
    def holding(self) -> frozenset[str]:
        """Workers with a lease in the round that has not come to an end."""
        return frozenset(lease.worker_id for lease in self.leases if _is_held(lease))

    def ranges(self, worker_id: str) -> tuple[LeaseRecord, ...]:
        """The rows leased to one worker, in order."""
        mine = (lease for lease in self.leases if lease.worker_id == worker_id)
        return tuple(lease for lease in mine if _is_held(lease))


def _is_held(lease: LeaseRecord) -> bool:
    return lease.state in (LeaseState.LEASED, LeaseState.DONE)


def _latest(t: Transaction) -> LatestRound | None:
    record = t.rounds.latest()
    if record is None:
        return None
    accepted = {c.worker_id: c for c in t.contributions.of_round(record.round)}
    return LatestRound(record, tuple(t.leases.of_round(record.round)), accepted)


class Rounds:
    """The latest round and the moves between its states. Thread-safe.

    Moves are made under the lock. Request threads read `latest` and `tokens` without it: each is
    replaced whole, so what is read is one moment's, though the two may be of different ones.
    """

    def __init__(
        self, ledger: Ledger, registry: Registry, clock: Clock, *, manifests: Manifests
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._clock = clock
        self._manifests = manifests
        self.dispatch = Dispatch(ledger, manifests.newest.manifest)
        self._deadlines = Deadlines(clock)
        self._lock = threading.RLock()
        self._quorum_since: float | None = None
        self.latest: LatestRound | None = None
        with ledger.reading() as t:
            self.tokens = t.contributions.counted_tokens()
        self.refresh()

    def refresh(self) -> None:
        """Copies the latest round from the ledger."""
        with self._lock:
            with self._ledger.reading() as t:
                latest = _latest(t)
            self._remember(latest)

    def _remember(self, latest: LatestRound | None) -> None:
        """Takes a copy of the ledger's latest round for what it is, once that is durable."""
        self.latest = latest
        if latest is not None:
            is_open = latest.record.state is RoundState.OPEN
            self._deadlines.hold(latest.record.round, latest.holding if is_open else frozenset())

    @property
    def in_force(self) -> Recorded:
        """The manifest version of the latest round; where none is under way, of the next one."""
        latest = self.latest
        if latest is None:
            return self._manifests.of_round(1)
        is_next = self._goes_on(latest.record)
        return self._manifests.of_round(latest.record.round + is_next)

    @property
    def frozen(self) -> int | None:
        """The round that is closed and not published yet; its successor is planned, if any is."""
        latest = self.latest
        if latest is None:
            return None
        behind = {RoundState.FROZEN: 0, RoundState.PLANNED: 1}.get(latest.record.state)
        return None if behind is None else latest.record.round - behind

    @property
    def planned(self) -> tuple[int, ...]:
        """The rounds that publishing the frozen one opens."""
        latest = self.latest
        is_planned = latest is not None and latest.record.state is RoundState.PLANNED
        return (latest.record.round,) if latest is not None and is_planned else ()

    def add_manifest(self, change: Callable[[Manifest], Manifest]) -> Recorded:
        """Records what `change` makes of the newest manifest, from the next round on.

        Under the lock that plans are made under: the round after the latest is planned either
        before this, and keeps its version, or after it. Nothing is recorded when nothing changes.
        """
        with self._lock:
            newest = self._manifests.newest
            changed = change(newest.manifest)
            if changed == newest.manifest:
                return newest
            number = 1 if self.latest is None else self.latest.record.round + 1
            record = versions.successor(newest, changed, from_round=number)
            with self._ledger.writing() as t:
                t.manifests.add(record)
            self._manifests.add(record)
            return self._manifests.newest

    def admit(self) -> None:
        """Begins a round that none before it has planned, and fills up a round that is short.

        Called when a worker registers and on every tick, since a death can make a round short.
        """
        with self._lock:
            live = self._registry.live()
            if self.latest is None or self._goes_on(self.latest.record):
                self._begin(sorted(live))
                return
            assert self.latest is not None
            for worker_id in sorted(live - self.latest.holding):
                if not self._is_short():
                    break  # on every tick, however many wait for the next round
                self._extend(worker_id)

    def _begin(self, live: list[str]) -> None:
        """Begins the first round, or the next one of a run that had come to its end before."""
        before = None if self.latest is None else self.latest.record
        number = 1 if before is None else before.round + 1
        if len(live) >= self._manifest_of(number).membership.min_workers:
            cursor = 0 if before is None else before.cursor
            with self._ledger.writing() as t:
                plan = self._plan(t, number, live, cursor=cursor, tokens=self.tokens)
                t.rounds.begin([plan])
                latest = _latest(t)
            self._remember(latest)

    def _goes_on(self, record: RoundRecord) -> bool:
        """Whether a round follows the last published one because a new manifest moved the end."""
        published = record.state is RoundState.PUBLISHED
        return published and not self._ends_after(record.round, self.tokens)

    def _manifest_of(self, round_number: int) -> Manifest:
        return self._manifests.of_round(round_number).manifest

    def _is_short(self) -> bool:
        assert self.latest is not None
        return self.latest.record.state in (
            RoundState.PLANNED,
            RoundState.OPEN,
        ) and quorum.is_short(self.view(), self.in_force.manifest.membership)

    def _extend(self, worker_id: str) -> None:
        assert self.latest is not None
        record = self.latest.record
        with self._ledger.writing() as t:
            cursor, tokens = record.cursor, record.tokens
            t.rounds.extend(self._plan(t, record.round, [worker_id], cursor=cursor, tokens=tokens))
            latest = _latest(t)
        log.info("round extended", extra={"round": record.round, "worker": worker_id})
        self._remember(latest)

    def _plan(
        self, t: Transaction, round_number: int, workers: list[str], *, cursor: int, tokens: int
    ) -> RoundPlan:
        recorded = self._manifests.of_round(round_number)
        return self.dispatch.plan(t, round_number, workers, recorded, cursor=cursor, tokens=tokens)

    def view(self) -> RoundView:
        """Sets for the closing rule."""
        assert self.latest is not None
        return RoundView(
            planned=self.latest.holding,
            accepted=frozenset(self.latest.contributions),
            live=self._registry.live(),
        )

    def waiting_for(self) -> list[str]:
        """Live workers whose contribution to the open round is missing, in order."""
        if self.latest is None or self.latest.record.state is not RoundState.OPEN:
            return []
        return sorted(quorum.waiting_for(self.view()))

    def accept(self, contribution: ContributionRecord, header: FrameHeader) -> ContributionRecord:
        """Records a validated contribution; returns the first one of its key.

        Under the same lock as `freeze`, so that the plan a freeze makes knows the whole set, and
        as `expire`: the leases that the header names are the ones that become done.
        """
        with self._lock:
            latest = self.latest
            at = None if latest is None else (latest.record.round, latest.record.state)
            if latest is not None and at == (contribution.round, RoundState.OPEN):
                leases.check_named(header, latest.ranges(contribution.worker_id))
            with self._ledger.writing() as t:
                accepted = t.contributions.accept(contribution)
            if self.latest is not None and self.latest.record.round == accepted.round:
                known = {**self.latest.contributions, accepted.worker_id: accepted}
                self.latest = replace(self.latest, contributions=known)
            return accepted

    def contribution(self, round_number: int, worker_id: str) -> ContributionRecord | None:
        """What was accepted under this key, in any round."""
        latest = self.latest
        if latest is not None and latest.record.round == round_number:
            return latest.contributions.get(worker_id)
        with self._ledger.reading() as t:
            return t.contributions.get(round_number, worker_id)

    def expire(self) -> list[str]:
        """Ends the leases that are held for too long; whose they were.

        The round goes on without them; what comes of them later is refused.
        """
        with self._lock:
            work = self.in_force.manifest.work
            if not work.lease_seconds or self.latest is None:
                return []
            late = self._deadlines.overdue(lease_seconds=work.lease_seconds)
            late = [worker for worker in late if worker not in self.latest.contributions]
            if late:
                reissue = work.policy == "exactly_once"
                with self._ledger.writing() as t:
                    t.rounds.expire(self.latest.record.round, late, reissue=reissue)
                    latest = _latest(t)
                self._remember(latest)
            return late

    def restart_deadlines(self) -> None:
        """Every lease has its full time again, as after a time in which nobody could use it."""
        with self._lock:
            self._deadlines.restart()

    def is_due(self) -> bool:
        """Whether the open round closes now."""
        with self._lock:
            if self.latest is None or self.latest.record.state is not RoundState.OPEN:
                return False
            view, settings = self.view(), self.in_force.manifest.membership
            if not quorum.has_quorum(view, settings):
                self._quorum_since = None
            elif self._quorum_since is None:
                self._quorum_since = self._clock.now()
            since = self._quorum_since
            held = 0.0 if since is None else self._clock.now() - since
            return quorum.is_due(view, settings, seconds_with_quorum=held)

    def freeze(self) -> list[ContributionRecord]:
        """Fixes the open round's ordered set, with the next round's plan; returns the set."""
        with self._lock:
            assert self.latest is not None
            record = self.latest.record
            tokens = self.tokens + sum(c.tokens for c in self.latest.contributions.values())
            planned = self.latest.planned
            members = sorted(self._registry.live())
            reissue = self.in_force.manifest.work.policy == "exactly_once"
            with self._ledger.writing() as t:
                next_plan = None
                if not self._ends_after(record.round, tokens):
                    # Leases that this very freeze reopens are given out from the round after the
                    # next: the plan must not depend on what the transaction is about to change.
                    next_plan = self._plan(
                        t, record.round + 1, members, cursor=record.cursor, tokens=tokens
                    )
                frozen = t.rounds.freeze(
                    record.round,
                    next_plan,
                    ended=[(record.round, worker_id) for worker_id in planned],
                    reissue=reissue,
                )
                latest = _latest(t)
            self.tokens = tokens
            self._quorum_since = None
            # From here on the round is closed for everybody who asks.
            self._remember(latest)
            return frozen

    def _ends_after(self, round_number: int, tokens: int) -> bool:
        # Whether there is a next round is for the manifest to say that it would be under.
        stop = self._manifest_of(round_number + 1).stop
        return (0 < stop.rounds <= round_number) or (0 < stop.tokens <= tokens)

    def is_finished(self) -> bool:
        """Whether the last round is published and none follows."""
        latest = self.latest
        if latest is None or latest.record.state is not RoundState.PUBLISHED:
            return False
        return self._ends_after(latest.record.round, self.tokens)
