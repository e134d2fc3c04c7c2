"""The schedule of a run once more, from what its seed drew: which round carries and takes what.

    round r      steps (r-1)*h + 1 to r*h, then the hand-in of fragment (r-1) mod P; the last: all
    merged       after exactly step r*h + tau
    contains     rows of rounds r-P+1 to r, none from before the island set out
    goes to      the oldest open round from its own on, at most so many later

Whoever draws a run knows its rules, so no strategy is asked, and one that answers wrongly is seen.
Only a strategy from outside, whose rules nobody here knows, is asked itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.strategies.base import ALL, Strategy


class Rules(Protocol):
    """What invariants ask in place of the strategy."""

    @property
    def lead(self) -> int:
        """How many rounds are open beyond the one that closes next."""

    @property
    def own(self) -> float:
        """What an island's own values weigh in a merge."""

    def fragment(self, number: int, *, is_last: bool) -> int:
        """What a round carries."""

    def first(self, number: int, began: int) -> int:
        """The first round whose rows a contribution contains."""

    def merged_before(self, number: int) -> int:
        """The version up to which an island has merged when it begins a round."""

    def merged_after(self, number: int, step: int) -> Sequence[int]:
        """What it merges after so many steps of the round."""

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        """The open round that takes a contribution; None: it is stale."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rules of the built-in modes."""

    steps: int  # of a round: h
    turns: int = 1  # rounds until a fragment's turn comes again: P
    delay: int = 0  # steps from a hand-in to its merge: tau
    own: float = 0.0
    bound: int = 0  # how many rounds after its own may take a contribution
    collecting: int = 0  # rounds that take what comes while another is computed

    @property
    def lead(self) -> int:
        return self.collecting + (self.delay + self.steps - 1) // self.steps

    def fragment(self, number: int, *, is_last: bool) -> int:
        return ALL if is_last and self.turns > 1 else (number - 1) % self.turns

    def first(self, number: int, began: int) -> int:
        return max(number - self.turns + 1, min(began, number))

    def merged_before(self, number: int) -> int:
        return max(0, ((number - 1) * self.steps - self.delay) // self.steps)

    def merged_after(self, number: int, step: int) -> Sequence[int]:
        made = (number - 1) * self.steps + step  # steps so far
        # Its own round is not handed in yet: without a delay it is merged before the next.
        return [r for r in range(1, number) if r * self.steps + self.delay == made]

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        return min((n for n in open_rounds if made_for <= n <= made_for + self.bound), default=None)


@dataclass(frozen=True)
class Asked:
    """The rules of a strategy from outside."""

    asked: Strategy

    @property
    def lead(self) -> int:
        return self.asked.lead

    @property
    def own(self) -> float:
        return self.asked.local_weight

    def fragment(self, number: int, *, is_last: bool) -> int:
        return self.asked.fragment(number, is_last=is_last)

    def first(self, number: int, began: int) -> int:
        return self.asked.first(number, began)

    def merged_before(self, number: int) -> int:
        return self.asked.needs(number)

    def merged_after(self, number: int, step: int) -> Sequence[int]:
        return self.asked.due(number, step)

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        return self.asked.destination(made_for, open_rounds)
