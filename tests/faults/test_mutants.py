"""Each rule of the protocol is needed: without it, the invariant meant for it is violated."""

from itertools import chain

import pytest

from atoll.simulate.faults import run as simulation
from atoll.simulate.faults.invariants.base import INVARIANTS
from tests.faults.mutants import MUTANTS, SURVIVORS, Mutant

FIRST_HALF, SECOND_HALF = MUTANTS[::2], MUTANTS[1::2]


def first_violation(mutant: Mutant, patch: pytest.MonkeyPatch) -> str | None:
    mutant.apply(patch)
    outcomes = (simulation.run(seed) for seed in mutant.seeds)
    return next((o.invariant for o in outcomes if not o.holds), None)
