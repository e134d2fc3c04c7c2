"""Mistakes of counts, of global sums, and of what every replica has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.collectives.base import Collectives, Key
from atoll.pools.arrows.terms import Count, GlobalSum, Once
from atoll.pools.calls import Item
from atoll.pools.desk import Desk
from atoll.pools.gradcheck.mutants.base import (
    ONE,
    Facts,
    Mutant,
    Prediction,
    Ratio,
    Structural,
    Table,
    at_least_one,
    changed,
    replacing,
)
from atoll.pools.gradcheck.mutants.reductions import AGAIN
from atoll.pools.placement import Seat
from atoll.pools.plan import Plan, count_name, once_name, sum_name


@dataclass(frozen=True, kw_only=True)
class LocalCount(Count):
    """A rank divides by what it has itself."""

    def run(self, desk: Desk, counts: Mapping[Item, int]) -> dict[Item, int]:
        super().run(desk, counts)
        return {item: counts.get(item, 0) for item in self.items}

    def divisor(self, term: str, counts: Mapping[Item, int]) -> float:
        return at_least_one(sum(counts.values()))


@dataclass(frozen=True, kw_only=True)
class BlockCount(Count):
    """The count of the own block's items alone."""

    def run(self, desk: Desk, counts: Mapping[Item, int]) -> dict[Item, int]:
        found = super().run(desk, counts)
        return {item: found[item] if item in counts else 0 for item in self.items}

    def divisor(self, term: str, counts: Mapping[Item, int]) -> float:
        return at_least_one(sum(counts.values()))


class OnAll(Once):
    """Every replica runs the backward."""

    def contributes(self, seat: Seat) -> bool:
        return True


class OnNone(Once):
    """Nobody runs the backward."""

    def contributes(self, seat: Seat) -> bool:
        return False


class CountedByAll(Once):
    """Every replica's count is in the sum."""

    def counts(self, seat: Seat) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class AutogradSum(GlobalSum):
    """An all-reduce whose backward is one, too: it sums as many equal gradients as ranks."""

    def run(self, desk: Desk, sums: Tensor, micro: int) -> Tensor:
        group = desk.groups[self.group(desk.seat)]
        key, back = desk.key(self.unit, micro), desk.key(self.unit + AGAIN, micro)
        found: Tensor = _AllReduce.apply(sums, group, key, back)  # type: ignore[no-untyped-call]
        return found


class _AllReduce(torch.autograd.Function):
    """As in torch.distributed.nn."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Collectives, key: Key, back: Key) -> Tensor:
        ctx.group, ctx.back = group, back
        return _summed(own, group, key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grads[0], ctx.group, ctx.back), None, None, None


def _summed(own: Tensor, group: Collectives, key: Key) -> Tensor:
    flat = own.detach().reshape(-1).clone()
    group.all_reduce(key, flat).wait()
    return flat.view(own.shape)


@dataclass(frozen=True, kw_only=True)
class LocalSum(GlobalSum):
    """No sum over ranks at all."""

    def run(self, desk: Desk, sums: Tensor, micro: int) -> Tensor:
        return sums


@dataclass(frozen=True, kw_only=True)
class UndetachedSum(GlobalSum):
    """local + (sum - local), where the second one is not detached: the gradient cancels."""

    def run(self, desk: Desk, sums: Tensor, micro: int) -> Tensor:
        total = super().run(desk, sums.detach(), micro)
        return sums + (total - sums)


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Of all terms of a plan."""
    for term in plan.top.of_kind("term"):
        count = plan.arrows[count_name(term.name)]
        once = plan.arrows.get(once_name(term.name))
        total = plan.arrows.get(sum_name(term.name))
        if isinstance(once, Once):
            yield from _of_once(plan, term.name, once)
        if isinstance(total, GlobalSum):
            yield from _of_sum(term.name, total)
        if isinstance(count, Count):
            yield from _of_count(plan, term.name, count, is_once=once is not None)


def _of_once(plan: Plan, term: str, once: Once) -> Iterator[Mutant]:
    ranks = plan.top.pools[plan.top.functions[term].pool].ranks
    for word, kind, ratio in (
        ("on all", OnAll, float(ranks)),
        ("on none", OnNone, 0.0),
        ("counted by all", CountedByAll, 1 / ranks),
    ):
        yield Mutant(
            f"{once.name}: {word}", replacing(changed(kind, once)), _of_term(term, Ratio(ratio))
        )


def _of_sum(term: str, total: GlobalSum) -> Iterator[Mutant]:
    ranks = max(len(group) for group in total.groups.values())
    for word, kind, prediction in (
        ("autograd all-reduce", AutogradSum, Ratio(float(ranks))),
        ("local", LocalSum, Structural() if ranks > 1 else ONE),
        ("undetached", UndetachedSum, Ratio(0.0)),
    ):
        yield Mutant(
            f"{total.name}: {word}", replacing(changed(kind, total)), _of_term(term, prediction)
        )


def _of_count(plan: Plan, term: str, count: Count, *, is_once: bool) -> Iterator[Mutant]:
    pool = plan.top.pools[plan.top.functions[term].pool]
    if term in plan.trace.through:
        alone = Structural() if pool.ranks > 1 else ONE
        yield Mutant(
            f"{count.name}: local", replacing(changed(LocalCount, count)), _of_term(term, alone)
        )
        return
    if not is_once:  # a replica that does not count would divide by 0
        yield Mutant(
            f"{count.name}: local", replacing(changed(LocalCount, count)), _by(term, _local)
        )
    if pool.name == _shared_out(plan, term):
        yield Mutant(
            f"{count.name}: of the block",
            replacing(changed(BlockCount, count)),
            _by(term, _block),
        )


def _shared_out(plan: Plan, term: str) -> str:
    axis = plan.top.functions[term].axis
    return "" if axis is None else plan.top.axes[axis].over


def _of_term(term: str, prediction: Prediction) -> Callable[[Facts], Table]:
    return lambda facts: {pair: prediction for pair in facts.pairs(term)}


def _by(term: str, divisor: Callable[[Facts, str, Seat], int]) -> Callable[[Facts], Table]:
    def table(facts: Facts) -> Table:
        once = facts.top.functions[term].once
        seats = [seat for seat in facts.seats(term) if seat.is_first or not once]
        divisors = {seat.rank: at_least_one(divisor(facts, term, seat)) for seat in seats}
        return facts.weighed(term, {rank: 1 / one for rank, one in divisors.items()})

    return table


def _local(facts: Facts, term: str, seat: Seat) -> int:
    return facts.share(term, seat)[1]


def _block(facts: Facts, term: str, seat: Seat) -> int:
    once = facts.top.functions[term].once
    return sum(
        facts.share(term, other)[1]
        for other in facts.seats(term)
        if other.block == seat.block and (other.is_first or not once)
    )
