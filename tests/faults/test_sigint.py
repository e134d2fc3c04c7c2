"""SIGINT ends a coordinator well in any phase of a round, also when it comes twice.

First while the outer step of round 2 is being computed (it stands still there, so it is left frozen
and computed by the next life), then twice while islands train.
"""

import signal
from dataclasses import dataclass

import pytest

from atoll.clock import SystemClock
from atoll.launch.local import LocalCoordinator
from tests import processes
from tests.processes import Cluster, Finished

pytestmark = pytest.mark.xdist_group("sigint")

SETTINGS = processes.BF16
COMPUTED_ROUND, TRAINED_ROUND = 2, 4
SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """How a coordinator ended."""

    exit_code: int
    seconds: float
    log: str


@dataclass(frozen=True)
class Interrupted:
    """The run and its two interruptions."""

    computing: Ended
    training: Ended
    finished: Finished


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    with Cluster(tmp_path_factory.mktemp("sigint"), SETTINGS) as cluster:
        first = cluster.prepare_coordinator(f"computing@{COMPUTED_ROUND}")
        coordinator = cluster.take_over(first)
        cluster.join_all()
        first.failpoint.wait_held(COMPUTED_ROUND)
        computing = _interrupt(coordinator, times=1)
        coordinator = cluster.serve()
        cluster.wait_status("a later round", lambda status: status.version >= TRAINED_ROUND - 1)
        training = _interrupt(coordinator, times=2)
        finished = cluster.finish(cluster.serve())
        return Interrupted(computing, training, finished)


def _interrupt(coordinator: LocalCoordinator, *, times: int) -> Ended:
    clock = SystemClock()
    began = clock.now()
    for _ in range(times):
        coordinator.popen.send_signal(signal.SIGINT)
    code = coordinator.wait(timeout_seconds=processes.LIMIT_SECONDS)
    return Ended(code, clock.now() - began, coordinator.log_tail())


@pytest.mark.parametrize("phase", ["computing", "training"])
def test_interrupted_coordinator_exits_with_zero_within_ten_seconds(
    interrupted: Interrupted, phase: str
) -> None:
    ended: Ended = getattr(interrupted, phase)

    assert ended.exit_code == 0
    assert ended.seconds <= SECONDS
    assert "Traceback" not in ended.log
    assert "coordinator stopped at version" in ended.log


def test_round_that_was_being_computed_is_left_frozen(interrupted: Interrupted) -> None:
    assert "it is frozen and replays at the next start" in interrupted.computing.log
    assert "coordinator stopped at version 1," in interrupted.computing.log


def test_interrupted_run_has_the_bits_of_an_undisturbed_one(
    interrupted: Interrupted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = processes.reference(tmp_path_factory, SETTINGS)

    assert interrupted.finished.digests == undisturbed.digests


def test_audit_of_an_interrupted_run_replays_clean(interrupted: Interrupted) -> None:
    report = processes.audit(interrupted.finished.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
