"""Each rule of the protocol is needed: without it, the invariant meant for it is violated.

The second half is in `test_mutants_more.py`: a file runs in one process.
"""

import pytest

from atoll.simulate.faults import run as simulation
from tests.faults.mutants.catalogue import MUTANTS
from tests.faults.mutants.mutant import first_violation
from tests.faults.mutants.survivors import SURVIVORS


@pytest.mark.parametrize("mutant", MUTANTS[::2], ids=lambda m: m.name)
def test_mutant_is_caught_by_the_invariant_meant_for_it(mutant, monkeypatch, relay):
    assert first_violation(mutant, monkeypatch) == mutant.invariant


def test_there_are_enough_mutants_and_nearly_all_are_caught():
    assert len(MUTANTS) >= 25
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) / (len(MUTANTS) + len(SURVIVORS)) >= 0.95


@pytest.mark.parametrize("name", SURVIVORS)
def test_survivor_is_as_silent_as_its_reason_says(name, monkeypatch):
    """One that is caught after all belongs among the mutants."""
    SURVIVORS[name].apply(monkeypatch)

    assert [o.invariant for o in map(simulation.run, range(3)) if not o.holds] == []
