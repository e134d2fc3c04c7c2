"""Gather runs for tests: their run file, and contributions as whoever folds them reads them."""

import hashlib
from collections.abc import Mapping
from typing import Any

from atoll.protocol.manifest import Manifest
from atoll.strategies.gather.local import Fetched
from tests import gather_reference as naive
from tests import run_tables

MAIN = {"url": "s3://atoll", "endpoint": "http://127.0.0.1:8333"}


OWN = {
    "strategy": "gather",
    "sync_every": 4,
    "upload": {"codec": "topk"},
    "outer": {"optimizer": "sgd"},
    "gather": {"buckets": {"main": MAIN}},
}


def table(**changes: Any) -> dict[str, Any]:
    """A gather run file; `changes` by dotted name with `__` for the dot."""
    return run_tables.table(OWN, changes)


def manifest(**changes: Any) -> Manifest:
    return run_tables.manifest(table(**changes))


def fetched(given: Mapping[str, naive.Peer]) -> list[Fetched]:
    """Contributions by worker_id, each behind a header of odd length."""
    head = b"h" * 77

    def of(peer: naive.Peer) -> Fetched:
        data = head + peer.payload
        name = hashlib.sha256(data).hexdigest()
        return Fetched(name, peer.weight, len(head), lambda at, n: data[at : at + n])

    return [of(given[uid]) for uid in sorted(given)]
