"""The second half of the mutants of `test_mutants.py`."""

import pytest

from tests.faults import mutants
from tests.faults.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS[1::2], ids=lambda m: m.name)
def test_mutant_is_caught_by_the_invariant_meant_for_it(mutant, monkeypatch):
    assert mutants.first_violation(mutant, monkeypatch) == mutant.invariant
