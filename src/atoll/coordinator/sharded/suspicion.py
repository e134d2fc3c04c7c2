"""Who goes when live ranks cannot reach each other: pure, from who misses whom.

The one that more ranks miss; on a tie one that says nothing itself, since whoever reports is only
waiting; then the higher worker_id.
"""

from collections.abc import Collection, Mapping, Set

from atoll.coordinator.sharded.regions import Pings

Missed = Mapping[str, Set[str]]  # by who reports: whom it does not reach


def verdict(missed: Missed, among: Collection[str]) -> str | None:
    """The one of `among` to be evicted; None when nobody of them is missed by another."""
    by = {
        worker: {reporter for reporter, names in missed.items() if worker in names} - {worker}
        for worker in among
    }
    suspects = [worker for worker, reporters in by.items() if reporters]
    return max(suspects, key=lambda w: (len(by[w]), w not in missed, w), default=None)


def unreached(workers: Collection[str], pings: Pings) -> dict[str, set[str]]:
    """Who misses whom, of workers that have pinged each other."""
    found = {
        worker: {other for other in workers if other != worker} - pings.get(worker, {}).keys()
        for worker in workers
    }
    return {worker: missing for worker, missing in found.items() if missing}
