"""A coordinator that is killed and comes back much later: every island waits and loses nothing.

In real time; seconds are ATOLL_AWAY_SECONDS (`make storm` sets 60). The simulator's suite does the
same for a minute of virtual time.
"""

import os

import pytest

from atoll.clock import SystemClock
from tests import processes
from tests.processes import BF16, KILLED, Cluster, Finished

pytestmark = [pytest.mark.storm, pytest.mark.xdist_group("coordinator-away")]

AWAY_SECONDS = float(os.environ.get("ATOLL_AWAY_SECONDS", "3"))
HELD_IN = 3
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with Cluster(tmp_path_factory.mktemp("away"), BF16) as cluster:
        coordinator = cluster.serve()
        held = cluster.join_held(HELD_IN)
        coordinator.kill()
        assert coordinator.wait(timeout_seconds=processes.LIMIT_SECONDS) == KILLED
        held.release()
        CLOCK.sleep(AWAY_SECONDS)  # the absence itself
        return cluster.finish(cluster.serve())


def test_run_ends_in_the_digest_of_one_whose_coordinator_never_went(
    returned: Finished, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = processes.reference(tmp_path_factory, BF16)

    assert returned.digests == calm.digests
    assert returned.island_digests == calm.island_digests


def test_islands_are_the_same_processes_after_the_absence(returned: Finished) -> None:
    assert {w.incarnation for w in returned.records.workers.values()} == {1}


def test_nothing_is_lost_or_counted_twice(
    returned: Finished, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = processes.reference(tmp_path_factory, BF16)

    assert returned.records.counted() == calm.records.counted()
