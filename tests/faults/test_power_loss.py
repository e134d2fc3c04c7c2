"""Power cuts all over a recorded run: from every disk they may leave, the run goes on.

`test_power_loss_controls.py` shows that this would notice each sync that is not there.
"""

import os
from pathlib import Path

import pytest

from tests.faults.power import images
from tests.faults.power.check import Checker
from tests.faults.power.disk import Disk
from tests.faults.power.machines import OPERATOR, ROUNDS
from tests.faults.power.recording import Recording, scratch
from tests.faults.power.search import Survey

# `make storm` asks for more of both; the limit is for a busy machine.
pytestmark = [pytest.mark.storm, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("ATOLL_POWER_SEED", "1"))
STATES = int(os.environ.get("ATOLL_POWER_STATES", "1020"))
RUNS = STATES // 50


@pytest.fixture(scope="module")
def surveyed(recording: Recording) -> Survey:
    checker = Checker(recording.marks)
    with scratch() as disks:
        return Survey(checker, disks, wanted=STATES, runs=RUNS).take(recording.events, seed=SEED)


def test_disk_model_gives_the_files_that_the_run_left(recording: Recording) -> None:
    disk = Disk(str(OPERATOR))
    for event in recording.events:
        disk.apply(event)

    assert images.whole(disk).files == _files(recording.root)


def test_recorded_run_promises_every_round(recording: Recording) -> None:
    published = [mark["published"] for mark in recording.marks if "published" in mark]
    received = [mark["received"] for mark in recording.marks if "received" in mark]

    assert published == list(range(1, ROUNDS + 1))
    assert sorted(received) == ["island-0"] * ROUNDS + ["island-1"] * ROUNDS


def test_every_promise_holds_on_a_thousand_disks_that_power_cuts_leave(surveyed: Survey) -> None:
    assert surveyed.broken == []
    assert len(surveyed.distinct) >= 1000


def test_run_ends_in_the_same_weights_after_a_power_cut(surveyed: Survey) -> None:
    assert surveyed.broken == []
    assert surveyed.completed >= RUNS - 1


def _files(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }
