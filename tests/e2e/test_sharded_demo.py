"""`make demo STRATEGY=sharded`: two ranks as processes, 50 steps, and the simulation's digest."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app

pytestmark = pytest.mark.xdist_group("sharded-demo")

RUN_FILE = str(Path(__file__).parents[2] / "examples" / "sharded.toml")


def said(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    return said("demo", RUN_FILE)


def test_two_ranks_train_fifty_steps_and_end_cleanly(shown: dict[str, Any]) -> None:
    assert (shown["islands"], shown["steps"], shown["rounds"]) == (2, 50, 5)
    assert shown["audit_clean"]
    assert shown["audit_checkpoints"] == 5
    assert shown["loss_last"] < shown["loss_first"] < shown["unigram_entropy"]


def test_bytes_between_ranks_are_measured(shown: dict[str, Any]) -> None:
    model = 4 * 410_240  # bytes
    # A step gathers every weight about twice and adds up once; held-out rows and saves come on top.
    assert 50 * 2 * model < shown["rank_bytes_sent"] < 50 * 5 * model
    assert 0.0 < shown["communication"] < 1.0
    assert shown["all_reduce_bytes"] == 0


def test_demo_and_simulation_end_in_one_digest(shown: dict[str, Any]) -> None:
    assert said("simulate", RUN_FILE, "--islands", "2")["digest"] == shown["digest"]
