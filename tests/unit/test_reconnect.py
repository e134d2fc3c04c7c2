"""Repeating what can succeed later: how long, how often, and what passes through."""

import random

import pytest

from atoll.clock import ManualClock
from atoll.errors import AtollError, CoordinatorUnreachable, NotReady, StaleContribution
from atoll.island.conversation import backoff
from tests.links import repeated


class Away:
    """A call that finds the coordinator away so many times, and when it was tried."""

    def __init__(self, clock: ManualClock, times: int, error: AtollError | None = None) -> None:
        self.tried: list[float] = []
        self._clock = clock
        self._times = times
        self._error = error or CoordinatorUnreachable()

    def __call__(self) -> str:
        self.tried.append(self._clock.now())
        if len(self.tried) <= self._times:
            raise self._error
        return "answer"

    @property
    def waits(self) -> list[float]:
        return [after - before for before, after in zip(self.tried, self.tried[1:], strict=False)]


def run(times: int, *, seed: int = 1, error: AtollError | None = None) -> Away:
    clock = ManualClock()
    away = Away(clock, times, error)
    assert repeated(away, clock, random.Random(seed)) == "answer"
    return away


def test_call_is_repeated_until_it_answers():
    away = run(7)

    assert len(away.tried) == 8


def test_answer_at_once_costs_no_time():
    away = run(0)

    assert away.tried == [0.0]


@pytest.mark.parametrize("error", [CoordinatorUnreachable(), NotReady()])
def test_error_that_says_retry_is_repeated(error):
    away = run(2, error=error)

    assert len(away.tried) == 3


def test_final_error_passes_through_at_once():
    clock = ManualClock()
    away = Away(clock, 1, StaleContribution("closed"))

    with pytest.raises(StaleContribution, match="closed"):
        repeated(away, clock, random.Random(1))

    assert len(away.tried) == 1


def test_foreign_exception_passes_through_at_once():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        repeated(broken, ManualClock(), random.Random(1))


def test_waits_double_up_to_the_longest_and_no_further():
    away = run(12)
    ideal = [
        min(backoff.LONGEST_SECONDS, backoff.FIRST_SECONDS * 2**attempt) for attempt in range(12)
    ]

    assert all(
        0.5 * most <= wait <= most * (1 + 1e-9)
        for wait, most in zip(away.waits, ideal, strict=True)
    )
    assert ideal[-1] == backoff.LONGEST_SECONDS


def test_waits_of_two_islands_differ():
    assert run(5, seed=1).waits != run(5, seed=2).waits


def test_waits_start_short_again_after_an_answer():
    clock = ManualClock()
    jitter = random.Random(1)
    repeated(Away(clock, 8), clock, jitter)
    again = Away(clock, 1)

    repeated(again, clock, jitter)

    assert again.waits[0] <= backoff.FIRST_SECONDS * (1 + 1e-9)
