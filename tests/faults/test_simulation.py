"""The coordinator under simulated faults: every invariant holds after every event of every seed.

The other half of the seeds is in `test_simulation_more.py`: a file runs in one process.
"""

import gc
import json
import os
import subprocess
import sys

import pytest

from atoll import cli
from atoll.coordinator.members import liveness
from atoll.errors import ConfigError
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults import situations
from atoll.simulate.faults.invariants.base import INVARIANTS, Violation
from atoll.simulate.faults.scenario import KINDS, Size
from tests import simulated
from tests.faults import test_gather_simulation

SEEDS = range(250)
# In so many of the first hundred seeds, at least.
SITUATIONS = {
    ("streaming", "a run"): 30,
    ("streaming", "met: joiner counted"): 8,
    ("streaming", "met: joiner began late"): 5,
    ("streaming", "met: coordinator died, in flight"): 8,
    ("streaming", "met: island died, in flight"): 8,
    ("streaming", "met: two in flight"): 3,
    ("async", "a run"): 12,
    ("async", "met: joiner counted"): 5,
    ("async", "met: coordinator died, in flight"): 2,
    ("async", "met: island died, in flight"): 2,
    ("async", "met: stale counted"): 4,
    ("async", "met: stale refused"): 2,
    ("async", "met: fewer steps"): 4,
}


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `atoll ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return int(done.value.code or 0)


@pytest.mark.parametrize("seeds", simulated.chunks(SEEDS), ids=str)
def test_invariants_hold_under_the_faults_of(seeds):
    assert simulated.failures(seeds) == []


def test_seeds_that_once_failed_hold():
    assert simulated.regressions() == []


def test_seed_gives_the_same_history_in_another_process():
    """With another hash seed: no order of a set decides anything."""
    here = simulation.run(7)

    told = subprocess.run(
        [sys.executable, "-m", "atoll", "simulate", "--faults", "7", "--json"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        check=True,
    ).stdout

    there = json.loads(told)["last"]
    assert (there["trace"], there["digest"], there["events"]) == (
        here.trace,
        here.digest,
        here.events,
    )


def test_violation_tells_the_members_of_a_set_in_their_order():
    found = Violation("no-orphans", needed_by_nothing={"c", "a", "d", "b"})

    assert found.detail == "needed_by_nothing=['a', 'b', 'c', 'd']"


def test_another_seed_gives_another_history():
    assert simulation.run(7).trace != simulation.run(8).trace


def test_size_of_a_run_can_be_set():
    outcome = simulation.run(7, Size(islands=6, rounds=3))

    assert (outcome.holds, outcome.islands, outcome.version) == (True, 6, 3)


def test_every_kind_of_fault_is_in_some_seed_and_missing_in_another():
    drawn = [scenarios.draw(seed).kinds for seed in SEEDS]

    assert [kind for kind in KINDS if not any(kind in kinds for kinds in drawn)] == []
    assert [kind for kind in KINDS if all(kind in kinds for kinds in drawn)] == []


def test_seed_draws_its_mode_and_nothing_else_depends_on_it():
    drawn = [scenarios.draw(seed) for seed in SEEDS]
    modes = ("sync", "streaming", "async")
    alike = [scenarios.draw(7, Size(mode_name=mode)) for mode in modes]

    assert {scenario.settings["mode"] for scenario in drawn} == {*modes}
    assert len({repr((s.kinds, s.data, s.islands, s.step_seconds)) for s in alike}) == 1
    assert len({repr(s.settings["work"]) for s in alike}) == 1


def test_mode_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="mode='turns' is not a mode of"):
        simulation.run(7, Size(mode_name="turns"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mode", "async", "--strategy", "relay"), "leave one of --mode and --strategy out"),
        (("--speeds", "4,1"), "--faults draws speeds itself"),
    ],
)
def test_command_refuses_options_that_mean_nothing(monkeypatch, capsys, options, says):
    assert atoll(monkeypatch, "simulate", "--faults", 7, *options) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_seeds_kill_the_coordinator_and_lose_messages():
    """Control: what is injected does happen."""
    seeds = [s for s in SEEDS if scenarios.draw(s).kinds >= {"crash coordinator", "loss"}][:5]

    counts = [simulation.run(seed).counts for seed in seeds]

    assert sum(count.get("coordinator killed", 0) for count in counts) >= 5
    assert sum(count.get("lost", 0) for count in counts) >= 50


@pytest.mark.timeout(600)  # alone it runs the seeds that the tests above have run otherwise
def test_seeds_meet_the_situations_that_modes_are_there_for():
    """Of what came about, not of what was drawn; among a hundred seeds each this often at least."""
    met = simulated.situations(SEEDS[:100])

    assert {key: met[key] for key, least in SITUATIONS.items() if met[key] < least} == {}


def test_every_situation_that_can_be_met_is_asked_for():
    asked = {name for _, name in SITUATIONS} | test_gather_simulation.SITUATIONS.keys()

    assert asked >= {*situations.SITUATIONS}


def test_command_shows_what_happened_and_the_digest(monkeypatch, capsys):
    code = atoll(monkeypatch, "simulate", "--faults", 7)

    shown = capsys.readouterr().out
    assert code == 0
    assert "faults of seed 7" in shown
    assert "params digest" in shown
    assert f"{len(INVARIANTS)} invariants checked" in shown


def test_failing_seed_shows_the_command_that_repeats_it(monkeypatch, capsys):
    monkeypatch.setattr(liveness, "scan", lambda *_: False)

    code = atoll(monkeypatch, "simulate", "--faults", 2, "--islands", 4, "--seeds", "1")

    shown = capsys.readouterr().out
    assert code == 1
    assert "silent-is-evicted does not hold" in shown
    assert "repeat it with: atoll simulate --faults 2 --islands 4" in shown


def test_failing_seed_is_told_as_json(monkeypatch, capsys):
    monkeypatch.setattr(liveness, "scan", lambda *_: False)

    code = atoll(monkeypatch, "simulate", "--faults", 2, "--json")

    told = json.loads(capsys.readouterr().out)
    assert code == 1
    assert told["failed"][0]["invariant"] == "silent-is-evicted"
    assert told["failed"][0]["repeat"] == "atoll simulate --faults 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--faults", "-1"), "below 0"),
        (("--faults", "0", "--seeds", "many"), "neither a number"),
        (("--faults", "0", "--seeds", "5:5"), "0 seeds"),
        (("run.toml", "--faults", "0"), "leave the run file out"),
        (("--faults", "0", "--islands", "1"), "--islands 1 is below 2"),
        ((), "no run file"),
    ],
)
def test_command_refuses(monkeypatch, capsys, arguments, said):
    assert atoll(monkeypatch, "simulate", *arguments) == 2
    assert said in capsys.readouterr().err


def test_simulation_leaves_no_open_file_behind():
    simulation.run(7)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    simulation.run(8)

    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
