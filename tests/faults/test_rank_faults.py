"""Sharded runs under faults that seeds draw; each must end as a calm one along the same groups."""

import os

import pytest

from atoll.island.sharded import restore as restoring
from atoll.island.sharded import training
from atoll.island.sharded.saving import Saving
from atoll.simulate import rank_faults

pytestmark = pytest.mark.xdist_group("rank-faults")

SEEDS = int(os.environ.get("ATOLL_RANK_SEEDS", "6"))
BITES = 2  # a seed whose ranks go back to a save of their disks
LOSES_A_RANK = 27  # one whose group goes on without a rank, from a save between two checkpoints


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed_ends_where_a_calm_training_ends(seed):
    outcome = rank_faults.run(seed)

    assert outcome.problem == ""
    assert outcome.groups >= 1


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(7048, id="a rank is drawn to be killed while it is down"),
        pytest.param(8014, id="a rank is started again before its last turn"),
        pytest.param(7051, id="all ranks are down at once and come back"),
    ],
)
def test_ranks_that_will_be_back_are_waited_for(seed):
    assert rank_faults.run(seed).problem == ""


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(19, id="late in several groups of two"),
        pytest.param(59, id="two of four are late after a death"),
    ],
)
def test_seeds_that_commit_by_quorum_have_late_ranks(seed):
    scenario, outcome = rank_faults.drawn(seed), rank_faults.run(seed)

    assert scenario.settings["sharded"]["commit"] == "quorum"
    assert outcome.problem == ""
    assert outcome.late > 0 and outcome.groups > 1


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(128, id="a rank misses others of a group that just ended"),
    ],
)
def test_seeds_that_once_failed_hold(seed):
    assert rank_faults.run(seed).problem == ""


def test_same_seed_is_the_same_story():
    assert rank_faults.drawn(7) == rank_faults.drawn(7) != rank_faults.drawn(8)


def test_seeds_go_back_to_saves(monkeypatch):
    """What the controls below change is used."""
    sources = []
    real = restoring.restore

    def noting(wanted, *given, **more):
        sources.append(wanted.source)
        real(wanted, *given, **more)

    monkeypatch.setattr(restoring, "restore", noting)
    rank_faults.run(BITES)

    assert "save" in sources


def test_control_restore_that_forgets_a_moment_is_found(monkeypatch):
    real = restoring.restore

    def forgetful(wanted, new, put, **more):
        def without(section, start, data):
            put(section, start, bytes(len(data)) if section == 2 else data)

        real(wanted, new, put if wanted.source == "initial" else without, **more)

    monkeypatch.setattr(restoring, "restore", forgetful)

    assert "a calm training" in rank_faults.run(BITES).problem


def test_control_skipped_step_after_going_back_is_found(monkeypatch):
    real = training.Training.restore

    def skipping(self):
        step = real(self)
        return step + (step > 0)

    monkeypatch.setattr(training.Training, "restore", skipping)

    assert rank_faults.run(BITES).problem != ""


def own_twice(self, draft):
    """In place of the predecessor's shard."""
    return draft.own.chunks(), draft.own.read


def test_control_saves_without_the_predecessors_shard_are_found(monkeypatch):
    monkeypatch.setattr(Saving, "_fetch", own_twice)

    assert "had told of their saves" in rank_faults.run(LOSES_A_RANK).problem
