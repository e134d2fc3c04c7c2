"""An island that stands still past the heartbeat timeout is evicted, and comes back by itself."""

import os
import signal
from dataclasses import dataclass, replace

import pytest

from atoll.errors import AtollError
from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import WorkerEntry, WorkersRequest
from tests import processes
from tests.processes import BF16, ISLANDS, TOKENS, Cluster, Finished

pytestmark = pytest.mark.xdist_group("island-evicted")

# SIGSTOP leaves every connection open: only heartbeats can notice it.
SETTINGS = replace(BF16, heartbeat_interval=0.3, heartbeat_timeout=2.0)
STOPPED = ISLANDS[1]
STOPPED_IN = 3


@dataclass(frozen=True)
class Evicted:
    """What was seen while the island stood still, and what the run came to."""

    entry: WorkerEntry
    finished: Finished


def evicted_entry(cluster: Cluster) -> WorkerEntry | None:
    link = NetworkLink(cluster.url, token=TOKENS.worker)
    try:
        [entry] = [w for w in link.send(WorkersRequest()).workers if w.worker_id == STOPPED]
    except AtollError:
        return None
    finally:
        link.close()
    return entry if entry.state == "evicted" else None


@pytest.fixture(scope="module")
def evicted(tmp_path_factory: pytest.TempPathFactory) -> Evicted:
    with Cluster(tmp_path_factory.mktemp("evicted"), SETTINGS) as cluster:
        coordinator = cluster.serve()
        held = cluster.join_held(STOPPED_IN)
        pid = cluster.islands[STOPPED].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            entry = processes.eventually("the eviction", lambda: evicted_entry(cluster))
        finally:
            os.kill(pid, signal.SIGCONT)
        held.release()
        return Evicted(entry, cluster.finish(coordinator))


def test_island_that_stands_still_is_evicted_for_its_silence(evicted: Evicted) -> None:
    assert "nothing was heard of it for 2." in evicted.entry.reason
    assert evicted.entry.rank is None


def test_evicted_island_rejoins_by_itself_in_its_next_incarnation(evicted: Evicted) -> None:
    incarnations = {n: w.incarnation for n, w in evicted.finished.records.workers.items()}

    assert incarnations == {ISLANDS[0]: 1, STOPPED: 2}


def test_work_of_the_evicted_island_counts(
    evicted: Evicted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It was in the middle of a round: the run has the bits of one in which it never stood."""
    calm = processes.reference(tmp_path_factory, BF16)

    assert evicted.finished.digests == calm.digests
    assert evicted.finished.records.workers_in(STOPPED_IN) == list(ISLANDS)
