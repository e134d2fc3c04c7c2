"""The second half of the mutants of `test_mutants.py`."""

import pytest

from tests.faults.mutants.catalogue import MUTANTS
from tests.faults.mutants.mutant import first_violation


@pytest.mark.parametrize("mutant", MUTANTS[1::2], ids=lambda m: m.name)
def test_mutant_is_caught_by_the_invariant_meant_for_it(mutant, monkeypatch, relay):
    assert first_violation(mutant, monkeypatch) == mutant.invariant
