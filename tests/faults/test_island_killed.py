"""SIGKILL of one of two islands where a round may close with one: the other goes on, it returns."""

from dataclasses import dataclass
from typing import Any

import pytest

from atoll.blobs.directory import DirectoryBlobs
from atoll.ledger.records import LeaseState
from atoll.protocol.messages import Status
from atoll.wire import frame
from tests import processes
from tests.processes import KILLED, ROUNDS, Cluster, Finished, Settings

pytestmark = pytest.mark.xdist_group("island-killed")

# Heartbeats of the default interval and timeout: what is noticed within 2 s is noticed by presence.
SETTINGS = Settings(min_workers=1)
SURVIVOR, VICTIM = processes.ISLANDS
KILLED_IN = 2
BACK_BY = 3  # the survivor stands still in this round until the victim is back


@dataclass(frozen=True)
class Returned:
    """What a run came to in which an island was killed and started again."""

    exit_code: int
    marker: dict[str, Any]
    status_when_back: Status
    finished: Finished

    def seconds_to_publication(self) -> float:
        """From the kill to the publication of the round it happened in."""
        published_wall = self.finished.records.rounds[KILLED_IN - 1].published_wall
        assert published_wall is not None
        return published_wall - float(self.marker["wall"])


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    with Cluster(tmp_path_factory.mktemp("island-killed"), SETTINGS) as cluster:
        coordinator = cluster.serve()
        survivor = cluster.prepare_island(SURVIVOR, "hold@1", f"hold@{BACK_BY}")
        victim = cluster.prepare_island(VICTIM, "hold@1", f"steps@{KILLED_IN}")
        again = cluster.prepare_island(VICTIM)
        cluster.enter(survivor)
        cluster.enter(victim)
        # Whoever registers first begins round 1 alone, and stands still there until the other one
        # is here, so that both are planned for round 2.
        cluster.wait_status("both islands", lambda status: _live(status) == {SURVIVOR, VICTIM})
        survivor.failpoint.release(1)
        victim.failpoint.release(1)
        exit_code = victim.process.wait(timeout_seconds=processes.LIMIT_SECONDS)
        survivor.failpoint.wait_held(BACK_BY)
        cluster.enter(again)
        back = cluster.wait_status("the victim's return", lambda status: VICTIM in _live(status))
        survivor.failpoint.release(BACK_BY)
        finished = cluster.finish(coordinator)
        return Returned(exit_code, victim.failpoint.marker(), back, finished)


def _live(status: Status) -> set[str]:
    return {worker.worker_id for worker in status.workers if worker.live}


def test_island_dies_by_sigkill_between_two_steps(returned: Returned) -> None:
    assert returned.exit_code == KILLED
    assert returned.marker["round"] == KILLED_IN


def test_round_closes_within_two_seconds_of_an_islands_kill(returned: Returned) -> None:
    """The survivor's own compute, two steps of a tiny model, is in the two seconds."""
    assert SETTINGS.heartbeat_timeout == 10.0
    assert returned.seconds_to_publication() <= 2.0


def test_round_closes_without_the_killed_island(returned: Returned) -> None:
    assert returned.finished.records.workers_in(KILLED_IN) == [SURVIVOR]


def test_restarted_island_rejoins_in_its_next_incarnation(returned: Returned) -> None:
    [back] = [w for w in returned.status_when_back.workers if w.worker_id == VICTIM]

    assert back.incarnation == 2


def test_restarted_island_contributes_to_the_rounds_after_its_return(returned: Returned) -> None:
    rounds = range(BACK_BY + 1, ROUNDS + 1)

    assert [returned.finished.records.workers_in(number) for number in rounds] == [
        [SURVIVOR, VICTIM] for _ in rounds
    ]


def test_restarted_island_starts_from_the_published_weights(returned: Returned) -> None:
    records = returned.finished.records
    [first, *_] = [c for c in records.contributions if c.worker_id == VICTIM and c.round > BACK_BY]
    blobs = DirectoryBlobs(returned.finished.directory / "blobs")
    with blobs.open(first.sha256) as stored:
        header, _ = frame.read_preamble(stored)
    blobs.close()

    published = records.rounds[first.round - 2].published_digest

    assert header.base_digest == published
    assert published != records.rounds[0].published_digest


def test_restarted_island_ends_with_the_others_digest(returned: Returned) -> None:
    published = returned.finished.records.rounds[-1].published_digest

    assert returned.finished.island_digests == {SURVIVOR: published, VICTIM: published}


def test_rows_of_the_killed_island_enter_a_later_round_once(returned: Returned) -> None:
    leases = returned.finished.records.leases
    [lost] = [x for x in leases if (x.round, x.worker_id) == (KILLED_IN, VICTIM)]
    done = [x for x in leases if x.state is LeaseState.DONE]

    covering = [
        row for x in done for row in range(x.start, x.stop) if lost.start <= row < lost.stop
    ]

    assert lost.state is LeaseState.TAKEN
    assert sorted(covering) == list(range(lost.start, lost.stop))


def test_audit_of_a_run_with_a_killed_island_replays_clean(returned: Returned) -> None:
    report = processes.audit(returned.finished.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert report["replayed_rounds"] == ROUNDS
