"""Runs under faults as tests use them: chunks of seeds, and what a failing one says."""

from collections.abc import Iterable

from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import seeds as naming
from atoll.simulate.faults.run import Outcome
from atoll.simulate.faults.scenario import Size

CHUNK = 10  # seeds of one test: well within its time limit on a busy machine
# Seeds that once failed, run first: what they found is told in the commit that mended it.
REGRESSIONS: tuple[int, ...] = ()


def chunks(seeds: range) -> list[range]:
    return [range(a, min(a + CHUNK, seeds.stop)) for a in range(seeds.start, seeds.stop, CHUNK)]


def failures(seeds: Iterable[int]) -> list[str]:
    """One line for each seed that does not hold, with the command that repeats it."""
    outcomes = (simulation.run(seed) for seed in seeds)
    return [told(outcome) for outcome in outcomes if not outcome.holds]


def told(outcome: Outcome) -> str:
    command = naming.command(outcome.seed, Size())
    return f"{outcome.invariant}: {outcome.detail}; repeat it with: {command}"
