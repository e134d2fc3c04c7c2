"""A rank whose gradients are lost: a mistake while its count is kept, an honest quorum without."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.pools.arrows.terms import Count, GlobalSum
from atoll.pools.calls import Item
from atoll.pools.desk import Desk
from atoll.pools.gradcheck.mutants.base import (
    Facts,
    Mutant,
    Table,
    at_least_one,
    changed,
    replacing,
)
from atoll.pools.plan import Plan, count_name, sum_name


@dataclass(frozen=True, kw_only=True)
class LostShare(Count):
    """One rank's gradients never enter; its count does."""

    lost: int

    def scale(self, desk: Desk, coeffs: Tensor, term: str, counts: Mapping[Item, int]) -> Tensor:
        found = super().scale(desk, coeffs, term, counts)
        return torch.zeros_like(found) if desk.seat.rank == self.lost else found


@dataclass(frozen=True, kw_only=True)
class LostWithCount(LostShare):
    """Neither its gradients nor its count enter."""

    def run(self, desk: Desk, counts: Mapping[Item, int]) -> dict[Item, int]:
        is_lost = desk.seat.rank == self.lost
        return super().run(desk, {} if is_lost else counts)

    def divisor(self, term: str, counts: Mapping[Item, int]) -> float:
        return at_least_one(sum(counts.values()))


@dataclass(frozen=True, kw_only=True)
class LostPart(GlobalSum):
    """The sum is whole; one rank's gradient of it never enters."""

    lost: int

    def scale(self, desk: Desk, coeffs: Tensor) -> Tensor:
        return torch.zeros_like(coeffs) if desk.seat.rank == self.lost else coeffs


def mutants(plan: Plan) -> Iterator[Mutant]:
    """The last rank of each term's pool, where it has another one."""
    for term in plan.top.of_kind("term"):
        ranks = [seat.rank for seat in plan.placement.of(term.pool)]
        if term.once:
            continue
        if term.name in plan.trace.through:
            total = plan.arrows[sum_name(term.name)]
            yield Mutant(
                f"rank lost, count kept: {term.name}",
                replacing(changed(LostPart, total, lost=ranks[-1])),
                _bent(term.name, ranks[-1]),
            )
            continue
        count = plan.arrows[count_name(term.name)]
        yield Mutant(
            f"rank lost, count kept: {term.name}",
            replacing(changed(LostShare, count, lost=ranks[-1])),
            _without(term.name, ranks[-1], is_counted=True),
        )
        if len(ranks) > 1:
            yield Mutant(
                f"rank lost with its count: {term.name}",
                replacing(changed(LostWithCount, count, lost=ranks[-1])),
                _without(term.name, ranks[-1], is_counted=False),
                is_control=True,
            )


def _without(term: str, lost: int, *, is_counted: bool) -> Callable[[Facts], Table]:
    def table(facts: Facts) -> Table:
        seats = facts.seats(term)
        count = sum(facts.share(term, s)[1] for s in seats if is_counted or s.rank != lost)
        weight = 1 / at_least_one(count)
        return facts.weighed(term, {s.rank: weight for s in seats if s.rank != lost})

    return table


def _bent(term: str, lost: int) -> Callable[[Facts], Table]:
    return lambda facts: facts.bent_without(term, lost)
