"""The simulator and real processes, given the same run file, end in the same bits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.lives import History, Lives, failpoint
from tests.processes import (
    BF16,
    INT8,
    KILLED,
    ROUNDS,
    STREAMING,
    Finished,
    Settings,
)

pytestmark = pytest.mark.xdist_group("simulate")

# bf16 with error feedback up and fp32 down; int8 up and a lossy bf16 down; fragments, lossy too.
SETTINGS = {"bf16-fp32": BF16, "int8-bf16": INT8, "streaming-int4-bf16": STREAMING}
VARIANTS = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


@pytest.fixture(scope="module")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> dict[Settings, dict[str, Any]]:
    home = tmp_path_factory.mktemp("simulate")
    return {s: processes.simulate(s.write(home / f"{n}.toml")) for n, s in SETTINGS.items()}


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


# Killed and started again, with fragments in flight

TROUBLED, CALM = processes.ISLANDS


@dataclass(frozen=True)
class Killed:
    """What a streaming run came to whose coordinator died once and one of its islands twice."""

    exit_codes: list[int | None]
    history: History
    audit: dict[str, Any]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    home = tmp_path_factory.mktemp("killed")
    with Lives(home, STREAMING.write(home / "run.toml")) as run:
        # In round 4 islands need version 2, so the coordinator is the first to die.
        dies = run.serve(**failpoint("coordinator", "before_publish@2", home / "publish"))
        island = run.join(TROUBLED, **failpoint("island", "steps@4", home / "steps"))
        run.join(CALM)
        exit_codes = [dies.wait()]
        run.serve()
        exit_codes.append(island.wait())
        island = run.join(TROUBLED, **failpoint("island", "receipt@5", home / "receipt"))
        exit_codes.append(island.wait())
        run.join(TROUBLED)
        run.finish()
        return Killed(exit_codes, run.history(), run.audit())


def test_killed_streaming_processes_end_in_the_digests_of_the_simulation(
    killed: Killed, simulations: dict[Settings, dict[str, Any]]
) -> None:
    history = simulations[STREAMING]["status"]["history"]

    assert killed.exit_codes == [KILLED] * 3
    assert killed.history.digests == [r["digest"] for r in history if r["round"] > 0]
    published = killed.history.rounds[-1].published_digest
    assert published == simulations[STREAMING]["published_digest"]


def test_killed_streaming_processes_have_every_row_in_every_fragment_once(killed: Killed) -> None:
    report = killed.audit

    assert (report["exit_code"], report["problems"]) == (0, [])
    assert [(f["counted"], f["missed"]) for f in report["fragments"]] == [(report["rows"], 0)] * 2
