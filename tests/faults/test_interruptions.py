"""One run with three interruptions that must leave no trace in its bits.

Round 2: an island is killed in the middle of its steps.
Round 3: it is killed when its receipt has arrived and it has made nothing of it yet.
Round 4: it stands still between two steps; meanwhile the coordinator is told to stop (SIGTERM) and
started again. Before that, a second coordinator had tried to use its directory.
"""

import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.launch.local import LocalCoordinator, LocalIsland
from tests import processes
from tests.processes import ATOLL, KILLED, ROUNDS, Cluster, Finished, Standby

pytestmark = pytest.mark.xdist_group("interruptions")

SETTINGS = processes.BF16
STEADY, TROUBLED = processes.ISLANDS
STEPS_ROUND, RECEIPT_ROUND, TERM_ROUND = 2, 3, 4
TERM_SECONDS = 10.0


@dataclass(frozen=True)
class Died:
    """How one life of an island ended."""

    exit_code: int
    marker: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """How the coordinator ended after SIGTERM, and what the round was waiting for then."""

    waiting_for: tuple[str, ...]
    exit_code: int
    seconds: float


@dataclass(frozen=True)
class Refused:
    """What a second coordinator on a held directory did."""

    holder_pid: int
    exit_code: int
    output: str
    first_still_serves: bool


@dataclass(frozen=True)
class Interrupted:
    """The whole run and each interruption."""

    cut_steps: Died
    lost_receipt: Died
    refused: Refused
    stopped: Stopped
    finished: Finished


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    with Cluster(tmp_path_factory.mktemp("interrupted"), SETTINGS) as cluster:
        coordinator = cluster.serve()
        second = _start_second(cluster)
        cluster.join(STEADY)
        lives = [
            cluster.prepare_island(TROUBLED, f"steps@{STEPS_ROUND}"),
            cluster.prepare_island(TROUBLED, f"receipt@{RECEIPT_ROUND}"),
        ]
        last = cluster.prepare_island(TROUBLED, f"hold@{TERM_ROUND}")
        restarted = cluster.prepare_coordinator("none@0")
        cut_steps, lost_receipt = [_death(cluster, life) for life in lives]
        cluster.enter(last)
        last.failpoint.wait_held(TERM_ROUND)
        refused = _refused(second, cluster, coordinator.pid)
        stopped = _stop(cluster, coordinator)
        coordinator = cluster.take_over(restarted)
        last.failpoint.release(TERM_ROUND)
        finished = cluster.finish(coordinator)
        return Interrupted(cut_steps, lost_receipt, refused, stopped, finished)


def _death(cluster: Cluster, life: Standby[LocalIsland]) -> Died:
    exit_code = cluster.enter(life).wait(timeout_seconds=processes.LIMIT_SECONDS)
    return Died(exit_code, life.failpoint.marker())


def _start_second(cluster: Cluster) -> "subprocess.Popen[bytes]":
    words = [*ATOLL, "serve", str(cluster.run_file), "--dir", str(cluster.directory), "--port", "0"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _refused(second: "subprocess.Popen[bytes]", cluster: Cluster, first_pid: int) -> Refused:
    with second:
        try:
            output, _ = second.communicate(timeout=processes.LIMIT_SECONDS)
        finally:
            second.kill()
    return Refused(first_pid, second.returncode, output.decode(), cluster.status() is not None)


def _stop(cluster: Cluster, coordinator: LocalCoordinator) -> Stopped:
    status = cluster.wait_status(
        "the steady island's contribution", lambda status: status.waiting_for == (TROUBLED,)
    )
    clock = SystemClock()
    began = clock.now()
    coordinator.terminate()
    exit_code = coordinator.wait(timeout_seconds=processes.LIMIT_SECONDS)
    return Stopped(status.waiting_for, exit_code, clock.now() - began)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return processes.reference(tmp_path_factory, SETTINGS)


def test_island_dies_in_the_middle_of_its_steps(interrupted: Interrupted) -> None:
    assert interrupted.cut_steps.exit_code == KILLED
    assert interrupted.cut_steps.marker["round"] == STEPS_ROUND


def test_island_dies_between_receipt_and_promotion(interrupted: Interrupted) -> None:
    assert interrupted.lost_receipt.exit_code == KILLED
    assert interrupted.lost_receipt.marker["round"] == RECEIPT_ROUND


def test_contribution_with_a_lost_receipt_counts_once(interrupted: Interrupted) -> None:
    records = interrupted.finished.records
    [counted] = [
        c for c in records.contributions if (c.round, c.worker_id) == (RECEIPT_ROUND, TROUBLED)
    ]

    # Accepted from the second life; the frame that the third one resent got that very receipt.
    assert counted.incarnation == 2
    assert _accepted_receipts(interrupted).count(counted.receipt) == 1


def _accepted_receipts(interrupted: Interrupted) -> list[str]:
    log = interrupted.finished.directory.with_name(f"{TROUBLED}.log").read_text()
    words = [
        word
        for line in log.splitlines()
        if "contribution accepted" in line
        for word in line.split()
    ]
    return [word.removeprefix("receipt=") for word in words if word.startswith("receipt=")]


def test_interrupted_island_returns_in_a_new_incarnation_each_time(
    interrupted: Interrupted,
) -> None:
    assert interrupted.finished.records.workers[TROUBLED].incarnation == 3


def test_coordinator_is_told_to_stop_in_the_middle_of_a_round(interrupted: Interrupted) -> None:
    assert interrupted.stopped.waiting_for == (TROUBLED,)


def test_coordinator_exits_with_zero_within_ten_seconds_of_sigterm(
    interrupted: Interrupted,
) -> None:
    assert interrupted.stopped.exit_code == 0
    assert interrupted.stopped.seconds <= TERM_SECONDS


def test_second_coordinator_on_a_held_directory_exits_naming_the_holder(
    interrupted: Interrupted,
) -> None:
    assert interrupted.refused.exit_code == 2
    assert f"process {interrupted.refused.holder_pid} " in interrupted.refused.output


def test_refused_second_coordinator_leaves_the_first_one_serving(
    interrupted: Interrupted,
) -> None:
    assert interrupted.refused.first_still_serves


def test_interrupted_run_ends_in_the_digest_of_an_undisturbed_one(
    interrupted: Interrupted, undisturbed: Finished
) -> None:
    assert interrupted.finished.digest == undisturbed.digest


def test_every_round_of_an_interrupted_run_has_the_bits_of_an_undisturbed_one(
    interrupted: Interrupted, undisturbed: Finished
) -> None:
    assert interrupted.finished.digests == undisturbed.digests


def test_interrupted_run_counts_what_an_undisturbed_one_counts(
    interrupted: Interrupted, undisturbed: Finished
) -> None:
    assert interrupted.finished.records.counted() == undisturbed.records.counted()


def test_audit_of_an_interrupted_run_replays_clean(interrupted: Interrupted) -> None:
    report = processes.audit(interrupted.finished.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert report["contributions"] == ROUNDS * len(processes.ISLANDS)
