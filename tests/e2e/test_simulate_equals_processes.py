"""The simulator and real processes, given the same run file, end in the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.processes import BF16, INT8, ROUNDS, Finished, Settings

pytestmark = pytest.mark.xdist_group("simulate")

# bf16 with error feedback up and fp32 down; int8 up and a lossy bf16 down.
VARIANTS = pytest.mark.parametrize("settings", [BF16, INT8], ids=["bf16-fp32", "int8-bf16"])


@pytest.fixture(scope="module")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> dict[Settings, dict[str, Any]]:
    home = tmp_path_factory.mktemp("simulate")
    return {s: processes.simulate(s.write(home / f"{s.upload}.toml")) for s in (BF16, INT8)}


@pytest.fixture
def real(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> Finished:
    return processes.reference(tmp_path_factory, settings)


@VARIANTS
def test_simulation_ends_in_the_params_digest_of_real_processes(
    simulations: dict[Settings, dict[str, Any]], real: Finished, settings: Settings
) -> None:
    simulated = simulations[settings]

    assert (simulated["digest"], simulated["published_digest"]) == real.digests[-1]


@VARIANTS
def test_every_simulated_round_has_the_digest_of_real_processes(
    simulations: dict[Settings, dict[str, Any]], real: Finished, settings: Settings
) -> None:
    history = simulations[settings]["status"]["history"]

    digests = [entry["digest"] for entry in history if entry["round"] > 0]

    assert len(digests) == ROUNDS
    assert digests == [master for master, _ in real.digests]


@VARIANTS
def test_islands_end_with_the_published_digest(real: Finished, settings: Settings) -> None:
    _, published = real.digests[-1]

    assert real.island_digests == dict.fromkeys(processes.ISLANDS, published)


def test_lossy_download_publishes_other_weights_than_the_master(
    simulations: dict[Settings, dict[str, Any]],
) -> None:
    simulated = simulations[INT8]

    assert simulated["digest"] != simulated["published_digest"]


def test_simulation_with_another_seed_ends_in_another_digest(
    simulations: dict[Settings, dict[str, Any]], tmp_path: Path
) -> None:
    other = replace(BF16, seed=BF16.seed + 1).write(tmp_path / "run.toml")

    simulated = processes.simulate(other)

    assert simulated["exit_code"] == 0
    assert simulated["digest"] != simulations[BF16]["digest"]


@VARIANTS
def test_audit_of_an_undisturbed_run_replays_clean(real: Finished, settings: Settings) -> None:
    report = processes.audit(real.directory)

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert (report["rounds"], report["replayed_rounds"]) == (ROUNDS, ROUNDS)
    assert report["digest"] == real.digest
