"""The convention that SUM replaces: averages, and factors that producers multiply in for them.

Reductions average; what replicas have comes from all of them; a global sum is differentiated
through; and a term whose gradients cross a foreign average is multiplied by that pool's size. Such
a term that has parameters of its own is then wrong on these, since one number feeds two averages
of different size. Terms of pools that own nothing were forgotten at first, which #545 mended.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from torch import Tensor

from atoll.pools.arrows.base import Arrow
from atoll.pools.arrows.edges import GradientEdge
from atoll.pools.arrows.reductions import Reduce, Returned
from atoll.pools.arrows.terms import Count, GlobalSum, Once
from atoll.pools.calls import Item
from atoll.pools.coverage import Way
from atoll.pools.desk import Desk
from atoll.pools.gradcheck.mutants.base import (
    Facts,
    Mutant,
    Prediction,
    Ratio,
    Structural,
    Table,
    changed,
)
from atoll.pools.gradcheck.mutants.reductions import AveragedReduce
from atoll.pools.gradcheck.mutants.returns import to_all
from atoll.pools.gradcheck.mutants.terms import AutogradSum, OnAll
from atoll.pools.plan import Plan, count_name
from atoll.pools.routes import Route


@dataclass(frozen=True, kw_only=True)
class Multiplied(Count):
    """The scale is multiplied by the size of a pool that it should not know."""

    factor: int

    def scale(self, desk: Desk, coeffs: Tensor, term: str, counts: Mapping[Item, int]) -> Tensor:
        return super().scale(desk, coeffs, term, counts) * float(self.factor)


@dataclass(frozen=True, kw_only=True)
class MultipliedEdge(GradientEdge):
    """#545: what is sent back is multiplied by the size of the pool that averages it."""

    factor: int

    def places(self, desk: Desk, route: Route) -> list[Tensor]:
        found = super().places(desk, route)
        if desk.seat.rank == route.to:
            return [part * self.factor for part in found]
        return found


def mutants(plan: Plan) -> Iterator[Mutant]:
    """The two programs that the convention was written against, where there are edges at all."""
    if not _edges(plan):
        return
    yield _program("legacy", is_mended=False)
    yield _program("legacy with #545", is_mended=True)


def _program(name: str, *, is_mended: bool) -> Mutant:
    return Mutant(
        name,
        lambda plan: plan.replaced(*_objects(plan, is_mended)),
        lambda facts: _table(facts, is_mended),
    )


def _edges(plan: Plan) -> list[GradientEdge]:
    return [arrow for arrow in plan.arrows.values() if isinstance(arrow, GradientEdge)]


def _owns(plan: Plan, pool: str) -> bool:
    return any(function.pool == pool for function in plan.top.of_kind("parameters"))


def _objects(plan: Plan, is_mended: bool) -> Iterator[Arrow]:
    for arrow in plan.arrows.values():
        if type(arrow) is Reduce:
            yield changed(AveragedReduce, arrow)
        elif type(arrow) is Once:
            yield changed(OnAll, arrow)
        elif type(arrow) is GlobalSum:
            yield changed(AutogradSum, arrow)
        elif type(arrow) is Returned:
            yield replace(arrow, returns=to_all(plan, arrow))
        elif type(arrow) is GradientEdge and is_mended and not _owns(plan, arrow.to):
            ranks = plan.top.pools[arrow.source].ranks
            yield changed(MultipliedEdge, arrow, factor=ranks)
    for term in plan.top.of_kind("term"):
        pool = _factor(plan, term.name)
        if pool is not None:
            ranks = plan.top.pools[pool].ranks
            yield changed(Multiplied, plan.arrows[count_name(term.name)], factor=ranks)


def _factor(plan: Plan, term: str) -> str | None:
    """By whose size a term of a pool with own parameters is multiplied, for its foreign values."""
    function = plan.top.functions[term]
    if not _owns(plan, function.pool) or term in plan.trace.through:
        return None
    sources = {
        edge.source
        for edge in _edges(plan)
        if edge.to == function.pool and edge.value in function.asks
    }
    return sources.pop() if len(sources) == 1 else None


def _table(facts: Facts, is_mended: bool) -> Table:
    """Of no pair where the program is right at whatever sizes, as it is where factors meet."""
    pools = facts.top.pools
    unequal = {name: Fraction(prime) for name, prime in zip(pools, _primes(), strict=False)}
    if all(ratios == {1} for ratios in _ratios(facts, unequal, is_mended).values()):
        return {}
    found: dict[tuple[str, str], Prediction] = {}
    ranks = {name: Fraction(pool.ranks) for name, pool in pools.items()}
    for pair, ratios in _ratios(facts, ranks, is_mended).items():
        found[pair] = Ratio(float(ratios.pop())) if len(ratios) == 1 else Structural()
    return found


def _primes() -> Iterator[int]:
    return (n for n in count(2) if all(n % k for k in range(2, n)))


def _ratios(
    facts: Facts, ranks: Mapping[str, Fraction], is_mended: bool
) -> dict[tuple[str, str], set[Fraction]]:
    """On each way of each term to each tensor, if pools were of these sizes."""
    return {
        pair: {_ratio(facts, way, pair[1], ranks, is_mended) for way in ways}
        for pair, ways in facts.ways.items()
    }


def _ratio(
    facts: Facts, way: Way, tensor: str, ranks: Mapping[str, Fraction], is_mended: bool
) -> Fraction:
    plan, term = facts.plan, way.term[0]
    function = facts.top.functions[term]
    owner = facts.owner(tensor)
    ratio = 1 / ranks[owner]  # the average at the owner
    ends = facts.pool_at(way, len(way.through))
    if ends != owner:
        ratio *= ranks[owner]  # what came back stands on every replica
    if function.once:
        ratio *= ranks[function.pool]
    if term in plan.trace.through:
        ratio *= ranks[function.pool]
    factor = _factor(plan, term)
    if factor is not None:
        ratio *= ranks[factor]
    for edge in _edges(plan) if is_mended else ():
        if not _owns(plan, edge.to) and facts.crosses(way, edge.value, edge.to):
            ratio *= ranks[edge.source]
    return ratio
