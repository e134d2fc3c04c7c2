"""Each rule of the protocol is needed: without it, the invariant meant for it is violated.

The second half is in `test_mutants_more.py`: a file runs in one process.
"""

from pathlib import Path

import pytest

from atoll.simulate.faults import run as simulation
from tests.faults.mutants.catalogue import MUTANTS
from tests.faults.mutants.mutant import first_violation
from tests.faults.mutants.survivors import SURVIVORS

TESTING = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.parametrize("mutant", MUTANTS[::2], ids=lambda m: m.name)
def test_mutant_is_caught_by_the_invariant_meant_for_it(mutant, monkeypatch, relay):
    assert first_violation(mutant, monkeypatch) == mutant.invariant


def test_there_are_enough_mutants_and_nearly_all_are_caught():
    assert len(MUTANTS) >= 25
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) / (len(MUTANTS) + len(SURVIVORS)) >= 0.95


def test_documented_rules_have_the_mutants_and_invariants_that_they_name():
    by_name = {mutant.name: mutant.invariant for mutant in MUTANTS}
    table = TESTING.read_text().split("| rule | invariant | mutant |\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]

    named = [(name, row[1].split(", ")) for row in rows for name in row[2].split("; ")]

    assert [name for name, held_by in named if by_name.get(name) not in held_by] == []
    assert len(rows) >= 20


@pytest.mark.parametrize("name", SURVIVORS)
def test_survivor_is_as_silent_as_its_reason_says(name, monkeypatch):
    """One that is caught after all belongs among the mutants."""
    SURVIVORS[name].apply(monkeypatch)

    assert [o.invariant for o in map(simulation.run, range(3)) if not o.holds] == []
