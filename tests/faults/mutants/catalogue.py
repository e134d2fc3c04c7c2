"""Protocol mutants: what the production code would do if one of its rules were missing.

Each changes the production code path itself, from outside, and names the invariant that is meant
to catch it. They stand by what they break, one file each.
"""

from tests.faults.mutants import (
    accepting,
    asynchronous,
    codecs,
    dispatch,
    island,
    rounds,
    schedule,
    standing,
    storage,
    weights,
)
from tests.faults.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    *standing.MUTANTS,
    *island.MUTANTS,
    *accepting.MUTANTS,
    *rounds.MUTANTS,
    *dispatch.MUTANTS,
    *weights.MUTANTS,
    *storage.MUTANTS,
    *asynchronous.MUTANTS,
    *codecs.MUTANTS,
    *schedule.MUTANTS,
]
