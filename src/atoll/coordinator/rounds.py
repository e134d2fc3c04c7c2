"""The life of a round: planned, open, frozen, published.

Owns which rows and workers belong to the latest round and when it closes. The ledger is the truth;
what is kept in memory is a copy of its latest round.
"""

import logging
import threading
from dataclasses import dataclass, replace

from atoll.clock import Clock
from atoll.coordinator import quorum
from atoll.coordinator.quorum import RoundView
from atoll.coordinator.registry import Registry
from atoll.data import plan as plans
from atoll.ledger.base import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    RoundPlan,
    RoundRecord,
    RoundState,
)
from atoll.protocol.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatestRound:
    """A copy of the ledger's latest round."""

    record: RoundRecord
    leases: tuple[LeaseRecord, ...]
    contributions: dict[str, ContributionRecord]

    @property
    def planned(self) -> frozenset[str]:
        return frozenset(lease.worker_id for lease in self.leases)

    def ranges(self, worker_id: str) -> tuple[LeaseRecord, ...]:
        """The rows leased to one worker, in order."""
        return tuple(lease for lease in self.leases if lease.worker_id == worker_id)


class Rounds:
    """The latest round and the moves between its states. Thread-safe."""

    def __init__(
        self, ledger: Ledger, registry: Registry, clock: Clock, *, manifest: Manifest
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._clock = clock
        self._manifest = manifest
        self._manifest_sha256 = manifest.sha256()
        self._lock = threading.RLock()
        self._quorum_since: float | None = None
        self.latest: LatestRound | None = None
        self.tokens = sum(
            contribution.tokens
            for record in ledger.rounds()
            for contribution in ledger.contributions(record.round)
            if record.state in (RoundState.FROZEN, RoundState.PUBLISHED)
        )
        self.refresh()

    def refresh(self) -> None:
        """Copies the latest round from the ledger."""
        with self._lock:
            record = self._ledger.latest_round()
            if record is None:
                return
            self.latest = LatestRound(
                record,
                tuple(self._ledger.leases(record.round)),
                {c.worker_id: c for c in self._ledger.contributions(record.round)},
            )

    def admit(self) -> None:
        """Begins the first round once enough workers are live, and fills up a round that is short.

        Called when a worker registers and on every tick, since a death can make a round short.
        """
        with self._lock:
            live = self._registry.live()
            if self.latest is None:
                if len(live) >= self._manifest.membership.min_workers:
                    self._ledger.begin(self._plan(1, sorted(live), cursor=0))
                    self.refresh()
                return
            for worker_id in sorted(live - self.latest.planned):
                if self._is_short():
                    self._extend(worker_id)

    def _is_short(self) -> bool:
        assert self.latest is not None
        return self.latest.record.state in (
            RoundState.PLANNED,
            RoundState.OPEN,
        ) and quorum.is_short(self.view(), self._manifest.membership)

    def _extend(self, worker_id: str) -> None:
        assert self.latest is not None
        record = self.latest.record
        self._ledger.extend(self._plan(record.round, [worker_id], cursor=record.cursor))
        log.info("round extended", extra={"round": record.round, "worker": worker_id})
        self.refresh()

    def _plan(self, round_number: int, workers: list[str], *, cursor: int) -> RoundPlan:
        reopened = self._ledger.reopened()
        by_range = {plans.Range(lease.start, lease.stop): lease for lease in reopened}
        planned = plans.plan(
            workers,
            rows_each=self._manifest.rows_per_round,
            cursor=cursor,
            reopened=list(by_range),
        )
        given = [
            LeaseRecord(round_number, worker, span.start, span.stop)
            for worker, spans in sorted(planned.ranges.items())
            for span in spans
        ]
        # What is left of a reopened lease that was needed only in part stays reopened.
        left = [
            replace(by_range[planned.taken[-1]], start=span.start, stop=span.stop)
            for span in planned.left
        ]
        return RoundPlan(
            round=round_number,
            manifest_sha256=self._manifest_sha256,
            cursor=planned.cursor,
            leases=tuple(given),
            taken=tuple(by_range[span] for span in planned.taken),
            left=tuple(left),
        )

    def view(self) -> RoundView:
        """Sets for the closing rule."""
        assert self.latest is not None
        return RoundView(
            planned=self.latest.planned,
            accepted=frozenset(self.latest.contributions),
            live=self._registry.live(),
        )

    def waiting_for(self) -> list[str]:
        """Live workers whose contribution to the open round is missing, in order."""
        if self.latest is None or self.latest.record.state is not RoundState.OPEN:
            return []
        return sorted(quorum.waiting_for(self.view()))

    def accept(self, contribution: ContributionRecord) -> ContributionRecord:
        """Records a validated contribution; returns the first one of its key.

        Under the same lock as `freeze`, so that the plan a freeze makes knows the whole set.
        """
        with self._lock:
            accepted = self._ledger.accept(contribution)
            if self.latest is not None and self.latest.record.round == accepted.round:
                self.latest.contributions[accepted.worker_id] = accepted
            return accepted

    def contribution(self, round_number: int, worker_id: str) -> ContributionRecord | None:
        """What was accepted under this key, in any round."""
        latest = self.latest
        if latest is not None and latest.record.round == round_number:
            return latest.contributions.get(worker_id)
        found = (c for c in self._ledger.contributions(round_number) if c.worker_id == worker_id)
        return next(found, None)

    def is_due(self) -> bool:
        """Whether the open round closes now."""
        with self._lock:
            if self.latest is None or self.latest.record.state is not RoundState.OPEN:
                return False
            view, settings = self.view(), self._manifest.membership
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
            next_plan = None
            if not self._ends_after(record.round, tokens):
                # Leases that this very freeze reopens are given out from the round after the next:
                # the plan must not depend on what the transaction is about to change.
                members = sorted(self._registry.live())
                next_plan = self._plan(record.round + 1, members, cursor=record.cursor)
            frozen = self._ledger.freeze(record.round, next_plan)
            self.tokens += sum(c.tokens for c in frozen)
            self._quorum_since = None
            # From here on the round is closed for everybody who asks.
            self.refresh()
            return frozen

    def _ends_after(self, round_number: int, tokens: int) -> bool:
        stop = self._manifest.stop
        return (stop.rounds is not None and round_number >= stop.rounds) or (
            stop.tokens is not None and tokens >= stop.tokens
        )

    def is_finished(self) -> bool:
        """Whether the last round is published and none follows."""
        latest = self.latest
        return latest is not None and latest.record.state is RoundState.PUBLISHED
