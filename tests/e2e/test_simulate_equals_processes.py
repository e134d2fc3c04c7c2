"""The simulator and real processes, given the same run file, end in the same bits."""

from pathlib import Path

import pytest

from tests import processes
from tests.processes import BF16, INT8, ROUNDS, Finished, Settings

pytestmark = pytest.mark.xdist_group("processes")

VARIANTS = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(BF16, id="upload-bf16-with-error-feedback"),
        pytest.param(INT8, id="upload-int8-download-bf16"),
    ],
)


def run_of_processes(factory: pytest.TempPathFactory, settings: Settings) -> Finished:
    return processes.reference(factory, settings)


@VARIANTS
def test_simulation_and_processes_end_in_the_same_params_digest(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, settings: Settings
) -> None:
    real = processes.reference(tmp_path_factory, settings)

    simulated = processes.simulate(settings.write(tmp_path / "run.toml"))

    assert len(real.digests) == ROUNDS
    assert (simulated["digest"], simulated["published_digest"]) == real.digests[-1]


@VARIANTS
def test_islands_end_with_the_published_digest(
    tmp_path_factory: pytest.TempPathFactory, settings: Settings
) -> None:
    real = processes.reference(tmp_path_factory, settings)

    assert real.island_digests == dict.fromkeys(processes.ISLANDS, real.digests[-1][1])
