"""Whether a contribution names exactly the rows that are leased, and when a lease is over."""

from collections.abc import Iterable, Sequence

from atoll.clock import Clock
from atoll.errors import LeaseLost
from atoll.ledger.records import LeaseRecord
from atoll.strategies.base import Lease
from atoll.wire.header import FrameHeader


def check_named(header: FrameHeader, leased: Sequence[LeaseRecord]) -> None:
    """LeaseLost unless the header names these rows and no others."""
    held = tuple(lease.row_range for lease in leased)
    if not held or header.ranges != held:
        raise LeaseLost(
            f"rows {header.ranges} are not leased to {header.worker_id!r} in round {header.round}; "
            f"its lease is {held}; ask for an assignment"
        )


class Deadlines:
    """Since when each lease of an open round is held, by the coordinator's own clock.

    Used under the lock of `Rounds`. In memory: after a restart, and after a pause, every lease has
    its full time again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[Lease, float] = {}

    def hold(self, leases: Iterable[Lease]) -> None:
        """Sets the leases of open rounds; the time of those known before runs on."""
        now = self._clock.now()
        self._since = {lease: self._since.get(lease, now) for lease in leases}

    def restart(self) -> None:
        """Every lease has its full time again."""
        self._since = dict.fromkeys(self._since, self._clock.now())

    def overdue(self, *, lease_seconds: float) -> list[Lease]:
        """Leases that have been held for `lease_seconds` or longer, in order."""
        now = self._clock.now()
        return sorted(x for x, since in self._since.items() if now - since >= lease_seconds)
