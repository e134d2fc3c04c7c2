"""A run's buckets in the memory of a simulation, whatever places its settings name."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.blobs.bucket import Bucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import Clock
from atoll.gather.keys import KEY_BYTES, SecretKey
from atoll.island.gather.base import Buckets
from atoll.island.gather.signing import Signing
from atoll.protocol.manifest import GatherSettings
from atoll.traffic import Traffic


def made_for(settings: GatherSettings, clock: Clock) -> dict[str, Bucket]:
    """An empty bucket for each that the run names; none in a run without any."""
    return {name: MemoryBucket(clock, name=name) for name in settings.buckets}


def of_island(
    buckets: Mapping[str, Bucket], worker_id: str, directory: Path, clock: Clock, traffic: Traffic
) -> Buckets | None:
    """They as one island uses them, with the key of its name; None in a run without any."""
    if not buckets:
        return None
    # Not at the top: in a large run all loops that are imported are compiled.
    from atoll.island.gather.buckets import IslandBuckets

    drawn = random.Random(f"signing {worker_id}")
    made = Signing(SecretKey(drawn.randbytes(KEY_BYTES)), drawn.choice(sorted(buckets)))
    return IslandBuckets(buckets, made, directory, clock, traffic, run=in_turn)


def in_turn(works: list[Callable[[], None]]) -> None:
    """One worker does it all: with several the order of downloads would be anybody's."""
    works[0]()
