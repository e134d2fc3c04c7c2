"""The order of a ring by the latencies between ranks: pure functions.

Ranks that reach each other within `REGION_MS`, directly or through others, make a region. The ring
goes region by region, in the order of their first worker_id, and inside one by worker_id, so it
crosses the border between two regions as rarely as a ring can.
"""

from collections.abc import Collection, Mapping

REGION_MS = 50.0

Pings = Mapping[str, Mapping[str, float]]  # ms, by who measured and to whom; absent: missed


def ring(workers: Collection[str], pings: Pings) -> list[str]:
    """The workers in the order of the ring."""
    left, found = sorted(workers), list[str]()
    while left:
        region = _region(left[0], left, pings)
        found += [worker for worker in left if worker in region]
        left = [worker for worker in left if worker not in region]
    return found


def latency(one: str, other: str, pings: Pings) -> float | None:
    """The faster of both directions, since noise only adds; None when neither was measured."""
    measured = [pings.get(one, {}).get(other), pings.get(other, {}).get(one)]
    return min((ms for ms in measured if ms is not None), default=None)


def _region(first: str, workers: Collection[str], pings: Pings) -> set[str]:
    """All that `first` reaches in steps of at most `REGION_MS`."""
    region, edge = {first}, [first]
    while edge:
        here = edge.pop()
        for other in workers:
            ms = latency(here, other, pings)
            if other not in region and ms is not None and ms <= REGION_MS:
                region.add(other)
                edge.append(other)
    return region
