"""Mistakes of reductions: an average, twice, none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from atoll.pools.arrows.reductions import Reduce
from atoll.pools.desk import Desk
from atoll.pools.gradcheck.mutants.base import (
    ONE,
    Differs,
    Facts,
    Mutant,
    Prediction,
    Ratio,
    Table,
    changed,
    replacing,
)
from atoll.pools.plan import Plan

AGAIN = 10_000  # added to an arrow's unit, for messages that its right kind does not have


@dataclass(frozen=True, kw_only=True)
class AveragedReduce(Reduce):
    """SUM to AVG."""

    def run(self, desk: Desk) -> None:
        super().run(desk)
        if desk.seat.pool == self.pool:
            for place in self.places(desk):
                place.div_(len(self.blocks[desk.seat.block_group]))


@dataclass(frozen=True, kw_only=True)
class ReducedTwice(Reduce):
    """What was summed is summed again."""

    def run(self, desk: Desk) -> None:
        super().run(desk)
        Reduce.run(replace(self, unit=self.unit + AGAIN), desk)


@dataclass(frozen=True, kw_only=True)
class NotReduced(Reduce):
    """Every replica keeps its own."""

    def run(self, desk: Desk) -> None:
        """Nothing is exchanged."""


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Of all reductions of a plan."""
    for arrow in plan.arrows.values():
        if type(arrow) is not Reduce:
            continue
        ranks = plan.top.pools[arrow.pool].ranks
        for word, kind, prediction in (
            ("SUM to AVG", AveragedReduce, Ratio(1 / ranks)),
            ("SUM twice", ReducedTwice, Ratio(float(ranks))),
            ("SUM to none", NotReduced, Differs() if ranks > 1 else ONE),
        ):
            yield Mutant(
                f"{arrow.name}: {word}",
                replacing(changed(kind, arrow)),
                _table(arrow.pool, prediction),
            )


def _table(pool: str, prediction: Prediction) -> Callable[[Facts], Table]:
    """Everything that one pool keeps is wrong alike."""
    return lambda facts: {pair: prediction for pair in facts.ways if facts.owner(pair[1]) == pool}
