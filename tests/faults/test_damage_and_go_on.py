"""Damage under a real run: the coordinator does not start, is repaired, and the run goes on.

The coordinator is killed in round 5. Then a snapshot and contributions are damaged, so that only
round 1 can be rebuilt. One island waits all the time; the other one is killed too and started
again, with the state of a round that never happened. Before the end the coordinator is told to stop
by SIGINT, twice.
"""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.launch import state
from atoll.launch.local import LocalProcess
from tests import damages, processes
from tests.ledgers import alone
from tests.processes import ISLANDS, KILLED, ROUNDS, Cluster, Finished

pytestmark = pytest.mark.xdist_group("damage")

SETTINGS = processes.BF16
KILL_ROUND, LAST_GOOD, STOP_ROUND = 5, 1, 3
STAYS, RETURNS = ISLANDS


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it said."""

    exit_code: int
    output: str


@dataclass(frozen=True)
class Repaired:
    """The run and each thing that was done to it."""

    damaged: str  # the blob of round 2
    refused: Ended
    looked: Ended
    mended: Ended
    interrupted: Ended
    finished: Finished


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Repaired:
    with Cluster(tmp_path_factory.mktemp("damaged"), SETTINGS) as cluster:
        killed = cluster.prepare_coordinator(f"idle@{KILL_ROUND}")
        cluster.take_over(killed)
        cluster.join_all()
        assert killed.process.wait(timeout_seconds=processes.LIMIT_SECONDS) == KILLED
        cluster.islands[RETURNS].kill()
        damaged = _damage(cluster.directory)
        refused = _ended(cluster.prepare_coordinator("none@0").go("--port", "0"))
        next_life = cluster.prepare_coordinator("none@1")
        looked = _run("repair", str(cluster.directory))
        mended = _run("repair", str(cluster.directory), "--yes")
        coordinator = cluster.take_over(next_life)
        cluster.join(RETURNS)
        next_life = cluster.prepare_coordinator("none@2")
        cluster.wait_status("a round after the repair", lambda s: s.version >= STOP_ROUND)
        coordinator.popen.send_signal(signal.SIGINT)
        coordinator.popen.send_signal(signal.SIGINT)
        interrupted = _ended(coordinator)
        finished = cluster.finish(cluster.take_over(next_life))
        return Repaired(damaged, refused, looked, mended, interrupted, finished)


def _damage(directory: Path) -> str:
    """Every snapshot and a contribution of round 2."""
    with state.at_rest(directory) as (ledger, _):
        snapshots = [snapshot.master_sha256 for snapshot in alone(ledger).snapshots.all()]
        contribution = alone(ledger).contributions.of_round(LAST_GOOD + 1)[0].sha256
    for sha256 in (*snapshots, contribution):
        damages.flip(directory / "blobs" / sha256[:2] / sha256, 2000)
    return contribution


def _run(*words: str) -> Ended:
    # In this process: loading torch once more would take longer than the command itself.
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return Ended(result.exit_code, result.output)


def _ended(process: LocalProcess) -> Ended:
    code = process.wait(timeout_seconds=processes.LIMIT_SECONDS)
    return Ended(code, process.log_tail())


def test_damaged_run_is_not_served(repaired: Repaired) -> None:
    assert repaired.refused.exit_code == 2


def test_refusal_names_the_last_good_round_and_the_way_out(repaired: Repaired) -> None:
    shown = repaired.refused.output

    assert "the snapshot of version 4" in shown
    assert f"the last good round is {LAST_GOOD}" in shown
    assert "`atoll repair " in shown
    assert "Traceback" not in shown


def test_looking_names_the_damage_and_exits_with_one(repaired: Repaired) -> None:
    assert repaired.looked.exit_code == 1
    assert repaired.damaged in repaired.looked.output


def test_repair_exits_with_zero(repaired: Repaired) -> None:
    assert repaired.mended.exit_code == 0
    assert "audit with replay: clean" in repaired.mended.output


def test_coordinator_interrupted_twice_ends_well(repaired: Repaired) -> None:
    assert repaired.interrupted.exit_code == 0
    assert "Traceback" not in repaired.interrupted.output


def test_island_with_the_state_of_a_lost_round_starts_from_the_runs_weights(
    repaired: Repaired,
) -> None:
    log = repaired.finished.directory.with_name(f"{RETURNS}.log").read_text()

    assert "belongs to another history and is dropped" in log


def test_repaired_run_completes_with_every_island(repaired: Repaired) -> None:
    records = repaired.finished.records

    assert [r.state.value for r in records.rounds] == ["published"] * ROUNDS
    assert records.workers_in(ROUNDS) == list(ISLANDS)


def test_islands_end_with_the_runs_digest(repaired: Repaired) -> None:
    assert set(repaired.finished.island_digests.values()) == {repaired.finished.digest}


def test_audit_of_a_repaired_run_replays_clean(repaired: Repaired) -> None:
    report = processes.audit(repaired.finished.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert report["replayed_rounds"] == ROUNDS
