"""Gather runs under simulated faults: servers of buckets fail too, and every invariant holds."""

from collections import Counter
from functools import lru_cache

import pytest

from atoll.simulate.faults import clipped, run
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults.buckets import FaultyBucket
from atoll.simulate.faults.run import Outcome
from atoll.simulate.faults.scenario import BUCKET_KINDS, Size
from tests import simulated

GATHER = Size(strategy_name="gather")
SEEDS = range(40)
# In so many of these seeds, at least.
SITUATIONS = {
    "met: gathered": 30,
    "met: skipped": 5,
    "met: stale refused": 15,
    "met: coordinator died, in flight": 6,
    "met: island died, in flight": 6,
    "object spoiled": 15,
}


@lru_cache(maxsize=200)
def outcome_of(seed: int) -> Outcome:
    return run.run(seed, GATHER)


@pytest.mark.parametrize("seeds", simulated.chunks(SEEDS), ids=str)
def test_invariants_hold_under_the_faults_of(seeds):
    outcomes = [outcome_of(seed) for seed in seeds]

    assert [simulated.told(found, GATHER) for found in outcomes if not found.holds] == []


@pytest.mark.timeout(300)  # alone it runs the seeds that the tests above have run otherwise
def test_seeds_meet_the_situations_that_they_are_there_for():
    met = Counter(name for seed in SEEDS for name in outcome_of(seed).counts)

    few = {name: met[name] for name, least in SITUATIONS.items() if met[name] < least}

    assert few == {}


def test_impostor_comes_under_no_name_that_its_owner_has_not_taken():
    """In this seed one would: the first key of a name stands, so its owner never got in."""
    assert run.run(9014, GATHER).invariant is None


def test_seed_gives_the_same_history_again():
    assert run.run(7, GATHER).trace == outcome_of(7).trace


def test_every_kind_of_a_buckets_fault_is_in_some_seed_and_missing_in_another():
    drawn = [scenarios.draw(seed, GATHER).kinds for seed in SEEDS]

    for kind in BUCKET_KINDS:
        assert {kind in kinds for kinds in drawn} == {True, False}


def test_runs_of_other_strategies_have_no_faults_of_buckets():
    assert not any(scenarios.draw(seed).kinds & {*BUCKET_KINDS} for seed in SEEDS)


def test_reference_without_the_clip_is_found_out(monkeypatch):
    """The control: the reference computes the medians itself, and they decide bits."""
    monkeypatch.setattr(clipped, "_norms", lambda _one, _owner, parameters: [1.0] * parameters)

    assert run.run(7, GATHER).invariant == "weights-bits"


def test_bucket_that_never_answers_is_found_out(monkeypatch):
    """The control: a run whose buckets stay away does not come to its end unseen."""
    monkeypatch.setattr(FaultyBucket, "_is_flaky", lambda _: True)

    assert run.run(0, Size(strategy_name="gather", islands=2, rounds=1)).invariant == "liveness"
