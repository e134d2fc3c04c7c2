"""SIGKILL of the coordinator at five points of a round, in one run that goes on after each.

Both islands live through all five; every life of the coordinator starts on the directory, and the
port, that the one before it left.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.launch import state
from atoll.ledger.records import RoundState
from tests import processes
from tests.processes import KILLED, ROUNDS, Cluster, Finished, Records
from tests.stored import is_stored

pytestmark = pytest.mark.xdist_group("coordinator-killed")

# A lossy download: after a kill the published weights are rebuilt beside the master, and an island
# that was cut off in an update has to fetch them whole.
SETTINGS = processes.INT8
KILLS = {
    "before_accept": 1,
    "before_commit": 2,
    "before_publish": 3,
    "download": 4,
    "idle": 5,
}


@dataclass(frozen=True)
class Killed:
    """What a kill left: the process's exit code, the failpoint's marker, a copy of the state."""

    exit_code: int
    marker: dict[str, Any]
    directory: Path
    records: Records

    def has_blob(self) -> bool:
        with state.at_rest(self.directory) as (_, blobs):
            return is_stored(blobs, self.marker["sha256"])

    def contributed(self) -> bool:
        return self.marker["worker_id"] in self.records.workers_in(self.marker["round"])


@dataclass(frozen=True)
class Survived:
    """The whole run, and the state after each kill."""

    finished: Finished
    killed: dict[str, Killed]


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    home = tmp_path_factory.mktemp("killed")
    killed: dict[str, Killed] = {}
    with Cluster(home, SETTINGS) as cluster:
        lives = {
            point: cluster.prepare_coordinator(f"{point}@{number}")
            for point, number in KILLS.items()
        }
        last = cluster.prepare_coordinator("none@0")
        for point, life in lives.items():
            coordinator = cluster.take_over(life)
            if not cluster.islands:
                cluster.join_all()
            exit_code = coordinator.wait(timeout_seconds=processes.LIMIT_SECONDS)
            # Looked at in a copy: opening the ledger would do the restart's recovery for it.
            copy = home / f"after-{point}"
            shutil.copytree(cluster.directory, copy)
            killed[point] = Killed(exit_code, life.failpoint.marker(), copy, processes.read(copy))
        return Survived(cluster.finish(cluster.take_over(last)), killed)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return processes.reference(tmp_path_factory, SETTINGS)


@pytest.mark.parametrize("point", KILLS)
def test_coordinator_dies_by_sigkill_at_the_point(survived: Survived, point: str) -> None:
    killed = survived.killed[point]

    assert killed.exit_code == KILLED
    assert (killed.marker["point"], killed.marker["round"]) == (point, KILLS[point])


def _frame_arrived_and_nothing_is_stored(killed: Killed) -> bool:
    return not killed.has_blob() and not killed.contributed()


def _blob_is_stored_and_not_recorded(killed: Killed) -> bool:
    return killed.has_blob() and not killed.contributed()


def _round_is_frozen_with_both(killed: Killed) -> bool:
    number = killed.marker["round"]
    frozen = killed.records.rounds[number - 1].state is RoundState.FROZEN
    return frozen and killed.records.workers_in(number) == list(processes.ISLANDS)


def _download_had_begun(killed: Killed) -> bool:
    return bool(0 < killed.marker["offset"] < killed.marker["nbytes"])


def _round_is_open_and_empty(killed: Killed) -> bool:
    number = killed.marker["open_round"]
    is_open = killed.records.rounds[number - 1].state is RoundState.OPEN
    return is_open and not killed.records.workers_in(number)


@pytest.mark.parametrize(
    ("point", "claim"),
    [
        ("before_accept", _frame_arrived_and_nothing_is_stored),
        ("before_commit", _blob_is_stored_and_not_recorded),
        ("before_publish", _round_is_frozen_with_both),
        ("download", _download_had_begun),
        ("idle", _round_is_open_and_empty),
    ],
)
def test_kill_leaves_the_state_of_its_point(
    survived: Survived, point: str, claim: Callable[[Killed], bool]
) -> None:
    killed = survived.killed[point]

    assert claim(killed)


def test_killed_run_ends_in_the_digest_of_one_never_killed(
    survived: Survived, never_killed: Finished
) -> None:
    assert survived.finished.digest == never_killed.digest


def test_every_round_of_a_killed_run_has_the_bits_of_one_never_killed(
    survived: Survived, never_killed: Finished
) -> None:
    assert survived.finished.digests == never_killed.digests


def test_islands_of_a_killed_run_hold_the_published_weights(survived: Survived) -> None:
    published = survived.finished.records.rounds[-1].published_digest

    assert survived.finished.island_digests == dict.fromkeys(processes.ISLANDS, published)


def test_no_contribution_is_lost_or_applied_twice_over_five_kills(
    survived: Survived, never_killed: Finished
) -> None:
    counted = survived.finished.records.counted()

    assert len(counted) == ROUNDS * len(processes.ISLANDS)
    assert counted == never_killed.records.counted()


def test_islands_keep_their_incarnation_over_five_kills(survived: Survived) -> None:
    workers = survived.finished.records.workers.values()

    assert {worker.incarnation for worker in workers} == {1}


def test_audit_of_a_killed_run_replays_clean(survived: Survived) -> None:
    report = processes.audit(survived.finished.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert (report["replayed_from"], report["replayed_rounds"]) == (0, ROUNDS)
