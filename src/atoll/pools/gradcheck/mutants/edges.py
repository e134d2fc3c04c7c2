"""Mistakes of values and gradients between pools: dropped, doubled, swapped, a step old."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.pools.arrows.edges import GradientEdge, ValueEdge
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
    changed,
    replacing,
)
from atoll.pools.gradcheck.mutants.reductions import AGAIN
from atoll.pools.plan import Plan


@dataclass(frozen=True, kw_only=True)
class BentValue(ValueEdge):
    """What arrives is changed before functions get it."""

    def bent(self, desk: Desk, item: Item, part: Tensor) -> Tensor:
        raise AssertionError((desk, item, part.shape))

    def run(self, desk: Desk) -> None:
        super().run(desk)
        if desk.seat.pool == self.to:
            leaves = desk.leaves[self.value]
            parts = {item: self.bent(desk, item, leaf.detach()) for item, leaf in leaves.items()}
            desk.put_leaves(self.value, parts)


class DroppedValue(BentValue):
    """Nothing came: the room is as it was made."""

    def bent(self, desk: Desk, item: Item, part: Tensor) -> Tensor:
        return torch.zeros_like(part)


class DoubledValue(BentValue):
    """The value came twice and was added."""

    def bent(self, desk: Desk, item: Item, part: Tensor) -> Tensor:
        return part + part


class SwappedValue(BentValue):
    """Each row got another one's value."""

    def bent(self, desk: Desk, item: Item, part: Tensor) -> Tensor:
        return part.roll(1, 0)


@dataclass(frozen=True, kw_only=True)
class StaleValue(BentValue):
    """The value is a step old; in the first step there is nothing older."""

    kept: dict[tuple[int, Item], Tensor] = field(default_factory=dict, compare=False)

    def bent(self, desk: Desk, item: Item, part: Tensor) -> Tensor:
        old = self.kept.get((desk.seat.rank, item), part)
        self.kept[desk.seat.rank, item] = part.clone()
        return old


class DroppedGradient(GradientEdge):
    """Nothing is sent back."""

    def run(self, desk: Desk) -> None:
        """Nothing is exchanged."""


class DoubledGradient(GradientEdge):
    """Every message is delivered twice."""

    def run(self, desk: Desk) -> None:
        super().run(desk)
        GradientEdge.run(replace(self, unit=self.unit + AGAIN), desk)


class SwappedGradient(GradientEdge):
    """Each row gets another one's gradient."""

    def sent(self, desk: Desk, parts: Sequence[Tensor], to: int) -> None:
        super().sent(desk, [part.roll(1, 1) for part in parts], to)


@dataclass(frozen=True, kw_only=True)
class StaleGradient(GradientEdge):
    """The gradient is a step old; in the first step there is nothing older."""

    kept: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict, compare=False)

    def sent(self, desk: Desk, parts: Sequence[Tensor], to: int) -> None:
        now = [part.clone() for part in parts]
        super().sent(desk, self.kept.get((desk.seat.rank, to), now), to)
        self.kept[desk.seat.rank, to] = now


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Of all edges of a plan."""
    for arrow in plan.arrows.values():
        if type(arrow) is ValueEdge:
            yield from _of_value(plan, arrow)
        elif type(arrow) is GradientEdge:
            yield from _of_gradient(arrow)


def _of_value(plan: Plan, edge: ValueEdge) -> Iterator[Mutant]:
    rows = plan.top.num_rows // plan.top.pools[edge.to].ranks
    for word, kind, steps, shows in (
        ("dropped", DroppedValue, 1, True),
        ("doubled", DoubledValue, 1, True),
        ("swapped", SwappedValue, 1, rows > 1),
        ("a step old", StaleValue, 2, True),
    ):
        prediction = Structural() if shows else ONE
        yield Mutant(
            f"{edge.name}: {word}",
            replacing(changed(kind, edge)),
            _asked(edge, prediction),
            steps=steps,
        )


def _of_gradient(edge: GradientEdge) -> Iterator[Mutant]:
    rows = min(len(route.rows) for route in edge.routes)
    for word, kind, steps, prediction in (
        ("dropped", DroppedGradient, 1, Ratio(0.0)),
        ("doubled", DoubledGradient, 1, Ratio(2.0)),
        ("swapped", SwappedGradient, 1, Structural() if rows > 1 else ONE),
        ("a step old", StaleGradient, 2, Structural()),
    ):
        yield Mutant(
            f"{edge.name}: {word}",
            replacing(changed(kind, edge)),
            _crossing(edge, prediction),
            steps=steps,
        )


def _asked(edge: ValueEdge, prediction: Prediction) -> Callable[[Facts], Table]:
    """All of each term that uses the value there, directly or through other values."""

    def table(facts: Facts) -> Table:
        terms = {
            pair[0]
            for pair, ways in facts.ways.items()
            for way in ways
            if facts.crosses(way, edge.value, edge.to)
        }
        return {pair: prediction for pair in facts.ways if pair[0] in terms}

    return table


def _crossing(edge: GradientEdge, prediction: Prediction) -> Callable[[Facts], Table]:
    return lambda facts: facts.over(
        lambda way, _: facts.crosses(way, edge.value, edge.to), prediction
    )
