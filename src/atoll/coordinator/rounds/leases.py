"""Whether a contribution names exactly the rows that are leased, and when a lease is over."""

from collections.abc import Sequence

from atoll.clock import Clock
from atoll.errors import LeaseLost
from atoll.ledger.records import LeaseRecord
from atoll.wire.header import FrameHeader

Key = tuple[int, str]  # round, worker_id


def check_named(header: FrameHeader, leased: Sequence[LeaseRecord]) -> None:
    """LeaseLost unless the header names these rows and no others.

    A frame that names no dataset was made where the run has one; its manifest says which.
    """
    held = [(lease.dataset_id, lease.start, lease.stop) for lease in leased]
    datasets = header.datasets
    if not datasets and len({name for name, _, _ in held}) == 1:
        datasets = (held[0][0],) * len(header.ranges)
    named = [(name, *span) for name, span in zip(datasets, header.ranges, strict=False)]
    if not held or named != held:
        raise LeaseLost(
            f"rows {[list(span) for span in header.ranges]} of datasets {list(header.datasets)} "
            f"are not leased to {header.worker_id!r} in round {header.round}; its lease is "
            f"{[list(row) for row in held]}; ask for an assignment"
        )


class Deadlines:
    """Since when each lease of the open round is held, by the coordinator's own clock.

    In memory: after a restart, and after a pause, every lease has its full time again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[Key, float] = {}

    def hold(self, round_number: int, workers: frozenset[str]) -> None:
        """These workers, and no others, hold leases of the open round."""
        now = self._clock.now()
        keys = [(round_number, worker_id) for worker_id in workers]
        self._since = {key: self._since.get(key, now) for key in keys}

    def restart(self) -> None:
        """Every lease has its full time again."""
        self._since = dict.fromkeys(self._since, self._clock.now())

    def overdue(self, *, lease_seconds: float) -> list[str]:
        """Workers that have held theirs for so long, in order."""
        now = self._clock.now()
        return sorted(w for (_, w), since in self._since.items() if now - since >= lease_seconds)
