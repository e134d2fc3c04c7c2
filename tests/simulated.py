"""Runs under faults as tests use them: chunks of seeds, and what a failing one says."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults import seeds as naming
from atoll.simulate.faults.run import Outcome
from atoll.simulate.faults.scenario import Size

CHUNK = 10  # seeds of one test: well within its time limit on a busy machine
# Seeds that once failed, run first: what they found is told in the commit that mended it.
# With the mode in which they did; None: the one that they draw.
REGRESSIONS: tuple[tuple[int, str | None], ...] = (
    *((86, "streaming"), (302, "streaming"), (393, "streaming")),
    (715, None),
)


def chunks(seeds: range) -> list[range]:
    return [range(a, min(a + CHUNK, seeds.stop)) for a in range(seeds.start, seeds.stop, CHUNK)]


def failures(seeds: Iterable[int]) -> list[str]:
    """One line for each seed that does not hold, with the command that repeats it."""
    return [told(outcome_of(seed)) for seed in seeds if not outcome_of(seed).holds]


@lru_cache(maxsize=1000)
def outcome_of(seed: int) -> Outcome:
    """What a seed came to: run once in a process."""
    return simulation.run(seed)


def regressions() -> list[str]:
    """One line for each regression that fails again, as above."""
    sizes = [(seed, Size(mode_name=mode)) for seed, mode in REGRESSIONS]
    outcomes = [(simulation.run(seed, size), size) for seed, size in sizes]
    return [told(outcome, size) for outcome, size in outcomes if not outcome.holds]


def situations(seeds: Iterable[int]) -> Counter[tuple[str, str]]:
    """In how many seeds each situation came about, by mode; "a run" where it came to its end."""
    met: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        outcome, mode = outcome_of(seed), scenarios.draw(seed).settings["mode"]
        met[mode, "a run"] += outcome.version == outcome.rounds
        met.update((mode, name) for name in outcome.counts if name.startswith("met: "))
    return met


def told(outcome: Outcome, size: Size | None = None) -> str:
    command = naming.command(outcome.seed, size or Size())
    return f"{outcome.invariant}: {outcome.detail}; repeat it with: {command}"
