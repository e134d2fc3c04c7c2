"""A round that is not published, as the coordinator remembers it: a copy of the ledger's rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    RoundRecord,
    RoundState,
)
from atoll.strategies.base import Lease


@dataclass(frozen=True)
class UnderWay:
    """One unpublished round. Never changed: a new one takes its place. Read by any thread."""

    record: RoundRecord
    leases: tuple[LeaseRecord, ...]
    contributions: dict[Lease, ContributionRecord]  # that it folds, by what they were made for

    @property
    def number(self) -> int:
        return self.record.round

    @property
    def is_open(self) -> bool:
        return self.record.state is RoundState.OPEN

    @property
    def is_planned(self) -> bool:
        return self.record.state is RoundState.PLANNED

    @property
    def holding(self) -> frozenset[str]:
        """Workers with a lease in the round that has not come to an end."""
        return frozenset(lease.worker_id for lease in self.held)

    @property
    def accepted(self) -> frozenset[str]:
        """Workers whose contribution the round folds."""
        return frozenset(worker_id for _, worker_id in self.contributions)

    @property
    def ended(self) -> frozenset[str]:
        """Workers whose lease of the round ended without a contribution."""
        return frozenset(lease.worker_id for lease in self.leases) - self.holding

    @property
    def held(self) -> tuple[LeaseRecord, ...]:
        """Leases that are under way or done: none that ended without a contribution."""
        return tuple(lease for lease in self.leases if _is_held(lease))

    def with_contribution(self, accepted: ContributionRecord) -> "UnderWay":
        """A copy of the round that folds this contribution too."""
        known = {**self.contributions, (accepted.round, accepted.worker_id): accepted}
        return replace(self, contributions=known)

    def ranges(self, worker_id: str) -> tuple[LeaseRecord, ...]:
        """The rows leased to one worker, in order."""
        return held(self.leases, worker_id)


def held(leases: Iterable[LeaseRecord], worker_id: str) -> tuple[LeaseRecord, ...]:
    """The leases of one worker, except those that ended without a contribution."""
    mine = (lease for lease in leases if lease.worker_id == worker_id)
    return tuple(lease for lease in mine if _is_held(lease))


def _is_held(lease: LeaseRecord) -> bool:
    return lease.state in (LeaseState.LEASED, LeaseState.DONE)
