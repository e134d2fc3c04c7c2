"""Mistakes of parameter gradients on their way back to the owner, and of what was published."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.pools.arrows.base import packed, unpacked
from atoll.pools.arrows.publication import Publication
from atoll.pools.arrows.reductions import Return, Returned
from atoll.pools.desk import Desk
from atoll.pools.gradcheck.mutants.base import (
    Facts,
    Gradient,
    Mutant,
    Prediction,
    Ratio,
    Structural,
    Table,
    changed,
    replacing,
)
from atoll.pools.gradcheck.mutants.reductions import AGAIN
from atoll.pools.plan import Plan


@dataclass(frozen=True, kw_only=True)
class NotReturned(Returned):
    """The message is dropped, or rather never sent."""

    def run(self, desk: Desk) -> None:
        """Nothing is exchanged."""


@dataclass(frozen=True, kw_only=True)
class ReturnedTwice(Returned):
    """The message is delivered twice."""

    def run(self, desk: Desk) -> None:
        super().run(desk)
        again = replace(self, unit=self.unit + AGAIN)
        for one in self.returns:
            if desk.seat.rank == self.source:
                flat = packed(self.places(desk, [one]))
                desk.world.send(desk.key(again.unit, 1), flat, to=one.to).wait()
            elif desk.seat.rank == one.to:
                again.take(desk, one)


@dataclass(frozen=True, kw_only=True)
class AveragedReturn(Returned):
    """The pool sends its mean."""

    def summed(self, desk: Desk, flat: Tensor) -> None:
        super().summed(desk, flat)
        flat.div_(len(self.ranks))


@dataclass(frozen=True, kw_only=True)
class UnsummedReturn(Returned):
    """The rank that speaks for the pool sends its own share alone."""

    def summed(self, desk: Desk, flat: Tensor) -> None:
        """Nothing is exchanged."""


@dataclass(frozen=True, kw_only=True)
class StaleReturn(Returned):
    """What is sent is a step old; in the first step there is nothing older."""

    kept: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def summed(self, desk: Desk, flat: Tensor) -> None:
        super().summed(desk, flat)
        now = flat.clone()
        flat.copy_(self.kept.get(desk.seat.rank, now))
        self.kept[desk.seat.rank] = now


@dataclass(frozen=True, kw_only=True)
class StalePublication(Publication):
    """What arrives is a step old; in the first step there is nothing older."""

    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False)

    def run(self, desk: Desk) -> None:
        super().run(desk)
        for sheet in self.sheets:
            if desk.seat.rank == sheet.to:
                own = [desk.trained[name] for name in sheet.tensors]
                with torch.no_grad():
                    now = packed(own)
                    old = self.kept.get((sheet.source, sheet.to), now)
                    for parameter, part in zip(own, unpacked(old, own), strict=True):
                        parameter.copy_(part)
                self.kept[sheet.source, sheet.to] = now


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Of all that borrowed parameters go through."""
    for arrow in plan.arrows.values():
        if type(arrow) is Returned:
            yield from _of_returned(plan, arrow)
        elif type(arrow) is Publication:
            yield Mutant(
                f"{arrow.name}: a step old",
                replacing(changed(StalePublication, arrow)),
                _published(arrow),
                steps=2,
            )


def _of_returned(plan: Plan, arrow: Returned) -> Iterator[Mutant]:
    ranks = len(arrow.ranks)
    owner = plan.placement.seats[arrow.returns[0].to].pool
    replicas = plan.top.pools[owner].ranks
    for word, kind, ratio in (
        ("dropped", NotReturned, 0.0),
        ("doubled", ReturnedTwice, 2.0),
        ("SUM to AVG", AveragedReturn, 1 / ranks),
    ):
        yield Mutant(
            f"{arrow.name}: {word}",
            replacing(changed(kind, arrow)),
            _returned(arrow.pool, owner, Ratio(ratio)),
        )
    yield Mutant(
        f"{arrow.name}: to all replicas",
        replacing(replace(arrow, returns=to_all(plan, arrow))),
        _returned(arrow.pool, owner, Ratio(float(replicas))),
    )
    yield Mutant(
        f"{arrow.name}: SUM to none",
        replacing(changed(UnsummedReturn, arrow)),
        lambda facts: _share_of_first(facts, arrow, owner),
    )
    yield Mutant(
        f"{arrow.name}: a step old",
        replacing(changed(StaleReturn, arrow)),
        _returned(arrow.pool, owner, Structural()),
        steps=2,
    )


def to_all(plan: Plan, arrow: Returned) -> tuple[Return, ...]:
    """The same messages to every replica of the blocks that they were for."""
    return tuple(
        replace(one, to=seat.rank)
        for one in arrow.returns
        for seat in plan.placement.of(plan.placement.seats[one.to].pool)
        if seat.block == plan.placement.seats[one.to].block
    )


def _returned(pool: str, owner: str, prediction: Prediction) -> Callable[[Facts], Table]:
    return lambda facts: facts.over(
        lambda way, tensor: facts.owner(tensor) == owner and facts.borrows(way, tensor, pool),
        prediction,
    )


def _share_of_first(facts: Facts, arrow: Returned, owner: str) -> Table:
    """One rank's share where a term is of this pool; what came there from others is structural.

    That rank has the items of its own block alone.
    """
    found: dict[tuple[str, str], Prediction] = {}
    for pair, prediction in _returned(arrow.pool, owner, Structural())(facts).items():
        term = pair[0]
        function = facts.top.functions[term]
        ways = facts.ways[pair]
        if len(arrow.ranks) == 1:
            found[pair] = Ratio(1.0)
        elif (
            function.pool != arrow.pool
            or any(way.through for way in ways)
            or term in facts.plan.trace.through
        ):
            found[pair] = prediction
        else:
            seats = [s for s in facts.seats(term) if s.is_first or not function.once]
            count = sum(facts.share(term, seat)[1] for seat in seats)
            (seat,) = [s for s in seats if s.rank == arrow.source]
            gradient = facts.share(term, seat)[0].get(pair[1])
            scale = facts.coeffs[term] / count
            found[pair] = Ratio(0.0) if gradient is None else Gradient(scale * gradient)
    return found


def _published(arrow: Publication) -> Callable[[Facts], Table]:
    """Every term that a function on these ranks is part of."""
    ranks = {sheet.to for sheet in arrow.sheets}
    tensors = {name for sheet in arrow.sheets for name in sheet.tensors}

    def table(facts: Facts) -> Table:
        pools = {facts.placement.seats[rank].pool for rank in ranks}
        terms = {
            pair[0]
            for pair, ways in facts.ways.items()
            for way in ways
            if pair[1] in tensors and facts.pool_at(way, len(way.through)) in pools
        }
        return {pair: Structural() for pair in facts.ways if pair[0] in terms}

    return table
