"""Real islands in a run whose manifest changes: adopted between rounds, whatever happens there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.island import trainer
from atoll.island.run import Run
from tests.seas import (
    Call,
    Sea,
    coordinator_restarts_after,
    coordinator_restarts_before,
    killed_after,
    killed_before,
    lost_reply,
)

ROUNDS = 4
NEW = 0.2


def changes_rate(sea: Sea, call: Call) -> Any:
    """The operator changes the rate while round 2 is open."""
    sea.coordinator.set_outer_lr(NEW)
    return call()


class NewFile:
    """The coordinator ends and is started again with a changed file and --new-manifest."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def __call__(self, sea: Sea, call: Call) -> Any:
        sea.restart(**self.changes)
        return call()


def sea_at(home: Path, **changes: Any) -> Sea:
    return Sea(home, **{"stop.rounds": ROUNDS, **changes})


# The third step of island a is its first of round 2.
MOMENT = ("a", "step", 3)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, float]]]:
    """Per island: manifest version and inner rate at every step."""
    found: dict[str, list[tuple[int, float]]] = {}
    train = trainer.train

    def watched(run: Run, *, after_step: Callable[[], None]) -> None:
        def after() -> None:
            manifest = run.manifest
            found.setdefault(run.worker_id, []).append(
                (manifest.manifest_version, manifest.inner.lr)
            )
            after_step()

        train(run, after_step=after)

    monkeypatch.setattr(trainer, "train", watched)
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sea_at(tmp_path_factory.mktemp("calm")).run()


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run whose rate changes while round 2 is open, and nothing goes wrong."""
    sea = sea_at(tmp_path_factory.mktemp("changed"))
    sea.faults[MOMENT] = changes_rate
    return sea.run()


def test_change_while_islands_train_moves_the_run(calm, changed):
    assert changed != calm


def test_islands_adopt_it_between_two_rounds_and_lose_nothing(tmp_path, seen, changed):
    sea = sea_at(tmp_path)
    sea.faults[MOMENT] = changes_rate

    assert sea.run() == changed
    assert [version for version, _ in seen["a"]] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [version for version, _ in seen["b"]] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert sum(sea.stale.values()) == 0
    assert sea.status.stale_contributions == 0


FAULTS = {
    "coordinator restarts before the upload": ("a", "upload", 2, coordinator_restarts_before),
    "coordinator restarts after the upload": ("b", "upload", 2, coordinator_restarts_after),
    "coordinator restarts in the new version": ("a", "upload", 3, coordinator_restarts_after),
    "receipt of the last round of the old version is lost": ("a", "upload", 2, lost_reply),
    "island is killed in the old version": ("a", "step", 4, killed_after),
    "island is killed before its upload": ("a", "upload", 2, killed_before),
    "island is killed after its upload": ("b", "upload", 2, killed_after),
    "island is killed in the new version": ("a", "step", 6, killed_after),
}


@pytest.mark.parametrize("name", FAULTS)
def test_run_with_a_change_ends_in_the_same_bits_over(tmp_path, changed, name):
    """The island's own checkpoint is of state alone: the settings are the coordinator's."""
    who, method, count, fault = FAULTS[name]
    sea = sea_at(tmp_path)
    sea.faults[MOMENT] = changes_rate
    sea.faults[who, method, count] = fault

    assert sea.run() == changed


@pytest.mark.parametrize(
    "changes",
    [
        {"inner.lr": 0.003},
        {"inner.batch": 1},
        {"inner.clip": 0.01},
        {"inner.weight_decay": 0.5},
        {"inner.beta1": 0.5},
        {"inner.precision": "bf16"},
        {"sync_every": 3},
        {"upload.codec": "int8"},
        {"upload.codec": "fp32"},
        {"upload.error_feedback": False},
        {"upload.rounding": "stochastic"},
        {"download.codec": "bf16"},
        {"weighting": "tokens"},
        {"outer.momentum": 0.5},
    ],
    ids=str,
)
def test_file_recorded_at_a_restart_is_adopted(tmp_path, calm, seen, changes):
    sea = sea_at(tmp_path)
    sea.faults[MOMENT] = NewFile(**changes)

    digest = sea.run()

    assert {version for version, _ in seen["a"]} == {version for version, _ in seen["b"]} == {1, 2}
    assert digest != calm or "weighting" in changes  # the islands have as many tokens each
    assert [r.contributions for r in sea.status.history] == [0, 2, 2, 2, 2]
    refusals = dict(sea.status.refusals)
    assert refusals.pop("STALE_GENERATION", 0) <= 1  # one may ask on after the other's goodbye
    assert refusals.keys() <= {"MANIFEST_MISMATCH"}


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_island_that_restarts_under_another_codec_takes_its_checkpoint_up(tmp_path, codec):
    other = "fp32" if codec == "bf16" else "bf16"
    digests = []
    for name, fault in (("whole", None), ("killed", killed_after)):
        sea = sea_at(tmp_path / name, **{"upload.codec": codec})
        sea.faults[MOMENT] = NewFile(**{"upload.codec": other})
        if fault is not None:
            sea.faults["a", "step", 5] = fault
        digests.append(sea.run())

    assert digests[0] == digests[1]


def test_slow_island_stays_a_member_while_a_new_version_comes_into_force(tmp_path):
    """Its heartbeats follow the manifest though its training is still under the one before."""
    settings = {"membership.quorum": 1, "membership.min_workers": 1}
    sea = sea_at(tmp_path, **settings)

    def slow(sea: Sea, call: Call) -> Any:
        sea.coordinator.set_outer_lr(NEW)
        for _ in range(4):
            sea.scheduler.sleep(2.0)
            assert "a" in sea.coordinator.members()
        return call()

    sea.faults[MOMENT] = slow

    sea.run()

    assert sea.lives["a"] == 1
    assert sea.stale["a"] == 1
