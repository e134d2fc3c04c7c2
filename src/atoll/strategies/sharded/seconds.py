"""Where the time of a step goes, by the clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from atoll.clock import Clock

Part = Literal["gather", "reduce", "step"]


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of a step: waiting for weights and for sums, the update, and all the rest."""

    gather: float = 0.0
    compute: float = 0.0
    reduce: float = 0.0
    step: float = 0.0

    def __add__(self, other: "Split") -> "Split":
        return Split(
            self.gather + other.gather,
            self.compute + other.compute,
            self.reduce + other.reduce,
            self.step + other.step,
        )

    @property
    def total(self) -> float:
        return self.gather + self.compute + self.reduce + self.step


class Seconds:
    """Adds up, from one `split` to the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[Part, float] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins now."""
        self._spent = dict.fromkeys(("gather", "reduce", "step"), 0.0)
        self._began = self._clock.now()

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """What is done in it counts as that part; parts do not nest."""
        began = self._clock.now()
        try:
            yield
        finally:
            self._spent[part] += self._clock.now() - began

    def split(self) -> Split:
        """Since the step began."""
        total = self._clock.now() - self._began
        spent = sum(self._spent.values())
        return Split(compute=max(0.0, total - spent), **self._spent)
