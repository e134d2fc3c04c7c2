"""What a mutant is: a changed plan, and what it is predicted to do to every term and tensor."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.layout import Span
from atoll.pools import calls, made
from atoll.pools.arrows.base import Arrow
from atoll.pools.calls import Item
from atoll.pools.counted import Through
from atoll.pools.coverage import Coverage, Way
from atoll.pools.placement import Seat
from atoll.pools.plan import Plan
from atoll.pools.reference import Grads, Reference


@dataclass(frozen=True, slots=True)
class Ratio:
    """The reference's gradient times this."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """This very gradient: ranks are weighed unevenly."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Structural:
    """Another gradient, which no number of sizes and counts gives; seen by its error."""


@dataclass(frozen=True, slots=True)
class Differs:
    """Replicas hold different gradients."""


Prediction = Ratio | Gradient | Structural | Differs
ONE = Ratio(1.0)
Table = Mapping[tuple[str, str], Prediction]  # (term, tensor); what is not named is ONE


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong program. A control is a right one, for the rows that arrived."""

    name: str
    change: Callable[[Plan], Plan]
    table: Callable[["Facts"], Table]
    steps: int = 1  # after how many it shows
    is_control: bool = False


Kind = TypeVar("Kind", bound=Arrow)


def changed(kind: type[Kind], arrow: Arrow, **more: Any) -> Kind:
    """An arrow of another kind with the fields of this one."""
    known: dict[str, Any] = {field.name: getattr(arrow, field.name) for field in fields(arrow)}
    return kind(**known, **more)


def replacing(arrow: Arrow) -> Callable[[Plan], Plan]:
    """The plan with this object in the place of the one of its name."""
    return lambda plan: plan.replaced(arrow)


def at_least_one(count: int) -> float:
    """What a program divides by that has nothing to count in one place."""
    return float(max(1, count))


class Facts:
    """What predictions are made from: sizes, and the reference's share of each rank."""

    def __init__(self, plan: Plan, coverage: Coverage, weights: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.top = plan.top
        self.placement = plan.placement
        self.coverage = coverage
        self._weights = weights
        self._shares: dict[tuple[str, int], tuple[Grads, int]] = {}
        self._reference = Reference(plan.top, weights)
        self.coeffs = {term.name: term.coeff for term in plan.top.of_kind("term")}
        # Trained tensors by module, and the module of each.
        self.modules: dict[str, tuple[str, Item]] = {
            name: key
            for key, module in self._reference.modules.items()
            for name, _ in made.trained({key: module})
        }
        self.ways: dict[tuple[str, str], list[Way]] = {}
        for tensor, key in self.modules.items():
            for way in dict.fromkeys(way for way, _ in coverage.wanted(key)):
                self.ways.setdefault((way.term[0], tensor), []).append(way)

    def pairs(self, term: str) -> Iterable[tuple[str, str]]:
        """All tensors that a term leads to."""
        return [pair for pair in self.ways if pair[0] == term]

    def owner(self, tensor: str) -> str:
        """The pool that keeps a tensor."""
        return self.top.functions[self.modules[tensor][0]].pool

    def replicas(self, tensor: str) -> int:
        """Ranks that keep it, each whole."""
        return self.top.pools[self.owner(tensor)].ranks

    def over(
        self, passes: Callable[[Way, str], bool], prediction: Prediction
    ) -> dict[tuple[str, str], Prediction]:
        """`prediction` where all ways of a term to a tensor pass; Structural where only some do."""
        found: dict[tuple[str, str], Prediction] = {}
        for pair, ways in self.ways.items():
            passing = [passes(way, pair[1]) for way in ways]
            if all(passing):
                found[pair] = prediction
            elif any(passing):
                found[pair] = Structural()
        return found

    def pool_at(self, way: Way, place: int) -> str:
        """Where the call is computed that asks for the value at a place of a way."""
        name = way.term[0] if place == 0 else way.through[place - 1][0]
        return self.top.functions[name].pool

    def crosses(self, way: Way, value: str, pool: str) -> bool:
        """Whether a way goes back over the edge of a value to those who asked for it there."""
        return any(
            name == value and self.pool_at(way, place) == pool
            for place, (name, _) in enumerate(way.through)
        )

    def borrows(self, way: Way, tensor: str, pool: str) -> bool:
        """Whether a way ends on `pool`, which does not keep the tensor."""
        ends = self.pool_at(way, len(way.through))
        return ends == pool and self.owner(tensor) != pool

    def seats(self, term: str) -> list[Seat]:
        """Ranks that compute a term."""
        return self.placement.of(self.top.functions[term].pool)

    def share(self, term: str, seat: Seat) -> tuple[Grads, int]:
        """Gradient and count of a term over one rank's rows and items, undivided."""
        if (term, seat.rank) not in self._shares:
            parts = self._reference.part(0, seat.rows, [term])[term].parts
            here = self.here(term, seat)
            totals = [part.total for item, part in parts.items() if item in here]
            count = sum(part.count for item, part in parts.items() if item in here)
            self._shares[term, seat.rank] = (
                self._reference.grads(torch.stack(totals).sum()),
                count,
            )
        return self._shares[term, seat.rank]

    def here(self, term: str, seat: Seat) -> list[Item]:
        """For which items a rank computes a term."""
        function = self.top.functions[term]
        if function.axis is None:
            return [None]
        return list(self.placement.items(seat)[function.axis])

    def weighed(self, term: str, weights: Mapping[int, float]) -> Table:
        """The gradient with each rank's share, by rank, times a weight of its own."""
        total: Grads = {}
        for seat in self.seats(term):
            grads, _ = self.share(term, seat)
            for name, grad in grads.items():
                part = self.coeffs[term] * weights.get(seat.rank, 0.0) * grad
                total[name] = total[name] + part if name in total else part
        return {(term, name): Gradient(grad) for name, grad in total.items()}

    def bent_without(self, term: str, lost: int) -> Table:
        """A Through whose sum is whole, and of whose gradient one rank's part is lost."""
        whole = self._reference.part(0, Span(0, self.top.num_rows), [term])[term]
        terms: list[Tensor] = []
        for item, part in whole.parts.items():
            assert isinstance(part, Through), part
            sums: list[Tensor] = []
            for seat in self.seats(term):
                if item in self.here(term, seat):
                    own = self._reference.part(0, seat.rows, [term])[term].parts[item].total
                    sums.append(own.detach() if seat.rank == lost else own)
            total = torch.stack(sums).sum(0)
            terms.append(calls.bent(self.top.functions[term], item, part, total, part.count))
        loss = self.coeffs[term] * torch.stack(terms).sum()
        grads = self._reference.grads(loss)
        # Of a pool of one rank nothing is left, and what is not there is not the right gradient.
        return {
            pair: Gradient(grads[pair[1]]) if pair[1] in grads else Ratio(0.0)
            for pair in self.pairs(term)
        }
