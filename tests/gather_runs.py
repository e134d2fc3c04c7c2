"""Gather runs for tests: their run file, and contributions as whoever folds them reads them."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from atoll import config
from atoll.protocol.manifest import Manifest
from atoll.strategies.gather.local import Fetched
from tests import gather_reference as naive
from tests.clusters import SMALL, manifest_for

MAIN = {"url": "s3://atoll", "endpoint": "http://127.0.0.1:8333"}


def table(**changes: Any) -> dict[str, Any]:
    """A gather run file; `changes` by dotted name with `__` for the dot."""
    made: dict[str, Any] = {
        "name": "run",
        "strategy": "gather",
        "sync_every": 4,
        "upload": {"codec": "topk"},
        "outer": {"optimizer": "sgd"},
        "gather": {"buckets": {"main": dict(MAIN)}},
        "stop": {"rounds": 3},
        "model": {"architecture": "custom"},
        "data": {"kind": "synthetic"},
    }
    for name, value in changes.items():
        *sections, last = name.split("__")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = copy.deepcopy(value)
    return made


def manifest(**changes: Any) -> Manifest:
    own = config.parse(table(**changes)).settings
    base = manifest_for(SMALL).model_dump(mode="json")
    return Manifest.model_validate(
        {**{k: v for k, v in base.items() if k in ("model", "data")}, **own}
    )


def fetched(given: Mapping[str, naive.Peer]) -> list[Fetched]:
    """Contributions by worker_id, each behind a header of odd length."""
    head = b"h" * 77

    def of(peer: naive.Peer) -> Fetched:
        data = head + peer.payload
        name = hashlib.sha256(data).hexdigest()
        return Fetched(name, peer.weight, len(head), lambda at, n: data[at : at + n])

    return [of(given[uid]) for uid in sorted(given)]
