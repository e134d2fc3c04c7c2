"""How much a rank holds in a whole window, fetched from S3 and applied: never its payloads."""

import pytest

from atoll.blobs.s3_bucket import S3Bucket
from benchmarks import gather_group as groups
from benchmarks import gather_rank
from benchmarks.gather_world import CLOCK, World, access
from tests.servers import BUCKET

BUDGET_MB, PEERS = 12, 12
MEGABYTES = 0.3  # of one payload


@pytest.fixture(scope="module")
def worlds(s3_server) -> tuple[World, World]:
    """What is measured, and a tiny one before it, for whatever loads late."""
    sizes = {"gather-memory": MEGABYTES, "gather-memory-warm": 0.02}
    made = [
        World.of(folder=folder, peers=PEERS, megabytes=size, budget_mb=BUDGET_MB)
        for folder, size in sizes.items()
    ]
    with S3Bucket(BUCKET, access(s3_server.url), CLOCK) as bucket:
        for world in made:
            world.publish(bucket)
    return made[0], made[1]


def test_window_stays_within_its_budget_and_one_that_holds_payloads_is_found(worlds, s3_server):
    world, warm = worlds

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
