"""How much a rank holds in a whole window or a catch-up, from S3 to weights: never its payloads."""

from typing import Any

import pytest

from atoll.blobs.s3_bucket import S3Bucket
from benchmarks import gather_group as groups
from benchmarks import gather_rank
from benchmarks.gather_world import CLOCK, World, access
from tests.servers import BUCKET

BUDGET_MB, PEERS = 12, 12
MEGABYTES, LATE_MEGABYTES = 0.3, 0.1  # of one payload


@pytest.fixture(scope="module")
def worlds(s3_server) -> dict[str, World]:
    """What is measured, and a tiny one before it, for whatever loads late."""
    sizes = {"window": MEGABYTES, "late": LATE_MEGABYTES, "warm": 0.02}
    made = [
        World.of(folder=f"memory-{name}", peers=PEERS, megabytes=size, budget_mb=BUDGET_MB)
        for name, size in sizes.items()
    ]
    with S3Bucket(BUCKET, access(s3_server.url), CLOCK) as bucket:
        for world in made:
            world.publish(bucket)
    return dict(zip(sizes, made, strict=True))


def test_window_stays_within_its_budget_and_one_that_holds_payloads_is_found(worlds, s3_server):
    world, warm = worlds["window"], worlds["warm"]

    def peak(mutant: str) -> float:
        [[found]] = groups.ran(
            world,
            [s3_server.url],
            warm=warm,
            measures_memory=True,
            mutant=mutant,
            preload=gather_rank.__name__,  # compiling takes longer than it saves here
        )
        assert found["accepted"] == PEERS
        return float(found["peak_mb"])

    kept, hoarded = peak(""), peak("holds payloads")

    assert kept < BUDGET_MB
    assert hoarded - kept > 0.6 * PEERS * MEGABYTES


def test_catch_up_stays_within_its_budget_and_one_that_holds_bodies_is_found(worlds, s3_server):
    """Two windows, the second fetched while the first is applied."""
    world, warm = worlds["late"], worlds["warm"]

    def ran(**options: Any) -> dict[str, Any]:
        [[found]] = groups.ran(
            world,
            [s3_server.url],
            warm=warm,
            archive="late",
            preload=gather_rank.__name__,
            **options,
        )
        return found

    newest = ran(part="recorded")["digest"]
    kept = ran(part="catch-up", measures_memory=True)
    hoarded = ran(part="catch-up", measures_memory=True, mutant="holds payloads")

    assert kept["digest"] == hoarded["digest"] == newest
    assert kept["peak_mb"] < BUDGET_MB
    assert hoarded["peak_mb"] - kept["peak_mb"] > 0.6 * 2 * PEERS * LATE_MEGABYTES
