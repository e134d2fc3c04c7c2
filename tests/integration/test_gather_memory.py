"""How much a rank holds in a whole window, fetched from S3 and applied: never its payloads."""

from dataclasses import replace

import pytest

from atoll.blobs.s3_bucket import S3Bucket
from benchmarks import gather_group as groups
from benchmarks import gather_rank
from benchmarks.gather_world import CLOCK, World, access
from tests.servers import BUCKET

BUDGET_MB, PEERS = 10, 16
MEGABYTES = 0.75  # of one payload: more than the budget in all


@pytest.fixture(scope="module")
def world(s3_server) -> World:
    made = World.of(folder="gather-memory", peers=PEERS, megabytes=MEGABYTES, budget_mb=BUDGET_MB)
    with S3Bucket(BUCKET, access(s3_server.url), CLOCK) as bucket:
        made.publish(bucket)
    return made


def test_window_stays_within_its_budget_and_one_that_holds_payloads_does_not(world, s3_server):
    def peak(mutant: str) -> float:
        warm = replace(world, asked=1)  # whatever loads late has loaded
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

    assert peak("") < BUDGET_MB < PEERS * MEGABYTES < peak("holds payloads")
