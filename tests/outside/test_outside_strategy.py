"""A strategy from outside: a file of its own, installed as a distribution of its own.

No line of Atoll knows it, and nothing here patches Atoll: coordinator, islands, simulation, fault
seeds, replay and audit find it by its entry point and ask it.
"""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.messages import Status
from tests import processes
from tests.processes import ATOLL, ISLANDS, KILLED, LIMIT_SECONDS, Cluster, Settings

RELAY = Path(__file__).with_name("relay.py")
MAX_LINES = 120
ROUNDS = 8
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "atoll-relay"
version = "1.0"

[project.entry-points."atoll.strategies"]
relay = "relay:Relay.of"

[tool.hatch.build.targets.wheel]
include = ["relay.py"]
"""
RUN = """
name = "outside"
strategy = "relay"
sync_every = 2

[model]
architecture = "gpt"
vocab = 16
block = 8
layers = 1
heads = 2
width = 16
{data}
[outer]
optimizer = "{optimizer}"
lr = 0.5

[upload]
codec = "int8"

[download]
codec = "{download}"

[membership]
min_workers = 2

[stop]
rounds = {rounds}

[storage]
snapshot_every = 3
"""


def run_file(path: Path, *, rounds: int, download: str = "bf16", optimizer: str = "adam") -> Path:
    """A run by turns; error feedback, encoded updates and two slots of outer state."""
    text = RUN.format(
        data=processes.SMALL_DATA, rounds=rounds, download=download, optimizer=optimizer
    )
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the distribution is installed: a folder for PYTHONPATH."""
    project = tmp_path_factory.mktemp("relay")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "relay.py").write_text(RELAY.read_text())
    installed = project / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    words = [*pip, "--no-build-isolation", "--target", str(installed), str(project)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return installed


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here on have it."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))


def atoll(*words: str | Path) -> dict[str, Any]:
    """What a command prints as JSON, in a process of its own."""
    done = subprocess.run(
        [*ATOLL, *map(str, words), "--json"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_file_is_short():
    assert len(RELAY.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(("download", "optimizer"), [("fp32", "nesterov"), ("bf16", "adam")])
def test_simulated_run_replays_to_its_digest(installed, tmp_path, download, optimizer):
    file = run_file(tmp_path / "run.toml", rounds=ROUNDS, download=download, optimizer=optimizer)

    simulated = atoll("simulate", file, "--islands", "3", "--dir", tmp_path / "state")
    audited = atoll("audit", tmp_path / "state", "--replay")

    assert audited["clean"], audited["problems"]
    assert audited["replayed_rounds"] == ROUNDS
    assert audited["digest"] == simulated["digest"]
    assert atoll("audit", tmp_path / "state")["digest"] == simulated["digest"]


def test_halves_go_in_turn_and_each_contribution_closes_its_round(installed, tmp_path):
    file = run_file(tmp_path / "run.toml", rounds=ROUNDS)

    atoll("simulate", file, "--islands", "2", "--dir", tmp_path / "state")

    records = processes.read(tmp_path / "state")
    assert [r.fragment for r in records.rounds] == [0, 1] * (ROUNDS // 2)
    assert [(c.round, c.applied, c.fragment) for c in records.contributions] == [
        (r.round, r.round, r.fragment) for r in records.rounds
    ]
    assert {c.worker_id for c in records.contributions} == set(ISLANDS)
    assert all(max(1, c.round - 1) <= c.first <= c.round for c in records.contributions)


def test_seeds_of_faults_hold(installed):
    found = atoll("simulate", "--faults", "0", "--seeds", "24", "--strategy", "relay")

    assert found["failed"] == []
    assert found["counts"]["round closed"] > 24
    assert found["last"]["repeat"].endswith("--strategy relay")


def test_processes_that_are_killed_leave_a_run_that_replays(installed, tmp_path):
    cluster = Cluster(tmp_path, Settings())
    run_file(cluster.run_file, rounds=12)
    chance = random.Random(5)
    with cluster:
        coordinator = cluster.serve()
        cluster.join_all()
        for version in (1, 3, 5, 7):
            cluster.wait_status(f"version {version}", partial(has_reached, version))
            victim = chance.choice(ISLANDS)
            cluster.islands[victim].kill()
            assert cluster.islands[victim].popen.returncode == KILLED
            cluster.join(victim)
            coordinator.kill()
            assert coordinator.popen.returncode == KILLED
            coordinator = cluster.serve()
        finished = cluster.finish(coordinator)

    audited = atoll("audit", finished.directory, "--replay")
    assert audited["clean"], audited["problems"]
    assert audited["replayed_rounds"] == 12
    assert set(finished.island_digests.values()) == {island_digest(finished.directory)}


def has_reached(version: int, status: Status) -> bool:
    return status.version >= version


def island_digest(directory: Path) -> str:
    """The digest of the published weights of the last version, which islands hold."""
    exported = atoll("export", directory, "-o", directory / "model.safetensors", "--published")
    return str(exported["atoll.digest"])


def test_worker_that_lacks_it_is_refused_by_name(site, tmp_path, monkeypatch):
    before = os.environ.get("PYTHONPATH")
    cluster = Cluster(tmp_path, Settings())
    run_file(cluster.run_file, rounds=ROUNDS)
    with cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))
            cluster.serve()
        island = cluster.join(ISLANDS[0])
        code = island.wait(timeout_seconds=LIMIT_SECONDS)

        assert code == 2
        assert "strategy='relay' is not installed here" in island.log_tail()


def test_coordinator_that_lacks_it_refuses_the_run_file_by_name(tmp_path):
    file = run_file(tmp_path / "run.toml", rounds=ROUNDS)

    done = subprocess.run(
        [*ATOLL, "simulate", str(file)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 2
    assert "strategy='relay' is not installed here" in " ".join(done.stderr.split())
