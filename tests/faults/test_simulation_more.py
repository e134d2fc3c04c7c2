"""The second half of the seeds of `test_simulation.py`."""

import pytest

from tests import simulated

SEEDS = range(250, 500)


@pytest.mark.parametrize("seeds", simulated.chunks(SEEDS), ids=str)
def test_invariants_hold_under_the_faults_of(seeds):
    assert simulated.failures(seeds) == []
