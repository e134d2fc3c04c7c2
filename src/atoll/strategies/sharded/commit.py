"""How a step is committed: one set of senders, the same for all spans, and where everybody is.

    collect   owners say who is whole with them; the set is whoever is whole at every owner
    fold      owners add up over that set and say the squares of their part of the mean
    update    owners step their shards with the norm that the squares make, and publish them

The first rank of the ring leads. Pure: no clock, no messages, no tensors. What is said again
changes nothing, so messages may be repeated; what contradicts it is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from atoll.errors import (
    ConfigError,
    Conflict,
    Diverged,
    EmptySum,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleContribution,
)

LEADER = 0
Kind = Literal["strict", "quorum"]
Stage = Literal["collect", "fold", "update", "done"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who must be in a step: everybody, or at the deadline at least `min_workers`."""

    kind: Kind
    size: int
    min_workers: int
    deadline_seconds: float  # that who is ready waits for the rest

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.size:
            raise ConfigError(
                f"min_workers={self.min_workers} is not from 1 to the group's {self.size} ranks"
            )
        if not (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise ConfigError(f"deadline_seconds={self.deadline_seconds} must be above 0")

    @property
    def needed(self) -> int:
        """The fewest that a step is committed with."""
        return self.size if self.kind == "strict" else self.min_workers

    def chosen(
        self, arrived: Mapping[int, frozenset[int]], *, is_late: bool
    ) -> frozenset[int] | None:
        """The set, from what each owner has whole; None while there may be more.

        MissingRanks, naming them, where it is late and too few are whole at every owner.
        """
        everybody = frozenset(range(self.size))
        silent = everybody - arrived.keys()
        whole = frozenset.intersection(everybody, *arrived.values())
        if not silent and whole == everybody:
            return whole
        if not is_late:
            return None
        if silent or len(whole) < self.needed:
            absent = sorted(silent or everybody - whole)
            raise MissingRanks(
                f"at the deadline of {self.deadline_seconds:g} s ranks {absent} are missing, and "
                f"{len(whole)} of {self.size} are whole at every owner; {self.kind} needs "
                f"{self.needed}; nothing is filled in, the step is given up",
                ranks=absent,
            )
        return whole


@dataclass(frozen=True, slots=True)
class Folded:
    """What one owner's part of a step's mean came to."""

    squares: float
    loss_sum: float
    tokens: int
    lr: float  # that the senders say


@dataclass(frozen=True, slots=True)
class Outcome:
    """A committed step, the same on all ranks."""

    step: int
    senders: frozenset[int]
    excluded: frozenset[int]  # what they computed is in no sum: their rows are open again
    loss_sum: float
    tokens: int
    lr: float
    norm: float  # of the mean gradient, before clipping


class Commit:
    """A step as its leader sees it."""

    def __init__(self, step: int, policy: Policy) -> None:
        self.step = step
        self.stage: Stage = "collect"
        self.senders: frozenset[int] = frozenset()
        self.outcome: Outcome | None = None
        self._policy = policy
        self._arrived: dict[int, frozenset[int]] = {}
        self._folded: dict[int, Folded] = {}
        self._updated: dict[int, bool] = {}

    def due(self) -> list[int]:
        """The owners that have not answered in this stage."""
        said: Mapping[str, Mapping[int, object]] = {
            "collect": self._arrived,
            "fold": self._folded,
            "update": self._updated,
        }
        answered = said.get(self.stage, range(self._policy.size))
        return [owner for owner in range(self._policy.size) if owner not in answered]

    def arrived(self, owner: int, senders: frozenset[int]) -> None:
        """Who is whole at an owner; later it may be more, never fewer."""
        if self.stage == "collect":
            self._arrived[owner] = self._arrived.get(owner, frozenset()) | senders
            self.decide(is_late=False)

    def decide(self, *, is_late: bool) -> None:
        """Fixes the set, if there is one; see `Policy.chosen`."""
        if self.stage != "collect":
            return
        chosen = self._policy.chosen(self._arrived, is_late=is_late)
        if chosen is not None:
            self.senders, self.stage = chosen, "fold"

    def folded(self, owner: int, found: Folded) -> None:
        """What an owner's part came to; after the last the norm is known.

        Diverged, EmptySum and ProtocolError: no owner has changed a weight.
        """
        before = self._folded.get(owner, found)
        # As text: a NaN is the same NaN when it comes again.
        if repr(before) != repr(found):
            raise Conflict(f"owner {owner} says {found} of step {self.step}, and said {before}")
        if self.stage != "fold":
            return
        self._folded[owner] = found
        if not self.due():
            self.outcome, self.stage = self._total(), "update"

    def _total(self) -> Outcome:
        size = self._policy.size
        first = self._folded[LEADER]
        for owner in range(size):
            other = self._folded[owner]
            # As text: a NaN is the same NaN.
            if repr(replace(other, squares=0.0)) != repr(replace(first, squares=0.0)):
                raise ProtocolError(
                    f"owner {owner} has {other} of step {self.step}, owner {LEADER} has {first}; "
                    f"the senders told them different things"
                )
        if first.tokens == 0 and len(self.senders) < size:
            absent = sorted(frozenset(range(size)) - self.senders)
            raise MissingRanks(
                f"all rows of step {self.step} are of ranks {absent}, who are late; nothing is "
                f"filled in, the step is given up",
                ranks=absent,
            )
        if first.tokens == 0:
            raise EmptySum(
                f"ranks {sorted(self.senders)} have no rows of step {self.step}; the weights are "
                f"unchanged"
            )
        squares = 0.0
        for owner in range(size):  # one order: the ranks'
            squares += self._folded[owner].squares
        norm = norm_of(squares, step=self.step)
        excluded = frozenset(range(size)) - self.senders
        return Outcome(
            self.step, self.senders, excluded, first.loss_sum, first.tokens, first.lr, norm
        )

    def updated(self, owner: int) -> None:
        """An owner has stepped its shard."""
        if self.stage == "update":
            self._updated[owner] = True
            if not self.due():
                self.stage = "done"


def norm_of(squares: float, *, step: int) -> float:
    """The norm of a step's mean gradient; Diverged where it is none."""
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    if not math.isfinite(norm):
        raise Diverged(
            f"the gradient of step {step} has the norm {norm}; the weights are unchanged; lower "
            f"inner.lr or set inner.clip"
        )
    return norm


class Progress:
    """Where one owner is: which version it has, and what of the next step is done."""

    def __init__(self, version: int) -> None:
        self.version = version  # the last step that is in its weights
        self._fold: tuple[frozenset[int], Folded] | None = None  # of the step after it

    def may_fold(self, step: int, senders: frozenset[int]) -> Folded | None:
        """What was found when it was asked before; None: it is to be done now."""
        self._check(step)
        if self._fold is None:
            return None
        before, found = self._fold
        if before != senders:
            raise Conflict(
                f"step {step} was folded over ranks {sorted(before)} and is asked for over "
                f"{sorted(senders)}; a step has one set"
            )
        return found

    def has_folded(self, senders: frozenset[int], found: Folded) -> None:
        """It is done."""
        self._fold = senders, found

    def may_update(self, step: int, senders: frozenset[int]) -> bool:
        """Whether it is to be done now; False: it was."""
        if step == self.version:
            return False
        if self.may_fold(step, senders) is None:
            raise ProtocolError(f"step {step} is to be updated before it was folded; fold it first")
        return True

    def has_updated(self, step: int) -> None:
        """It is done."""
        self.version, self._fold = step, None

    def _check(self, step: int) -> None:
        if step <= self.version:
            raise StaleContribution(
                f"step={step} is over, step {self.version + 1} is the present one"
            )
        if step > self.version + 1:
            raise NotReady(f"step={step} is still to come, {self.version + 1} is the present one")
