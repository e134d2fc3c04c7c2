"""One rank at work: goes through a plan's sequence, computing and running arrows.

Knows nothing of optimizers: what a step leaves are gradients on the owners of parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from atoll.collectives.base import Collectives
from atoll.pools import compute, made
from atoll.pools.arrows.base import Arrow
from atoll.pools.arrows.terms import Count, GlobalSum, Log, Once
from atoll.pools.desk import Desk
from atoll.pools.lanes import Lanes
from atoll.pools.made import Modules
from atoll.pools.placement import Placement, Seat
from atoll.pools.plan import Act, Plan, count_name, once_name, sum_name
from atoll.pools.topology import Topology


@dataclass(frozen=True, slots=True)
class Told:
    """What every rank knows of a step that was made."""

    losses: Mapping[str, float]  # of each term, with its coefficient
    counts: Mapping[str, int]


class Engine:
    """One rank of a topology; all ranks of its world call `step` together.

    `groups` are this rank's collectives: of the world, of its pool and of its block.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, Collectives],
        weights: Mapping[str, Tensor],
        *,
        rank: int,
    ) -> None:
        self.plan = plan
        self.seat = plan.placement.seats[rank]
        modules = made.modules(plan.top, _here(plan.top, plan.placement, self.seat))
        made.fill(modules, weights)
        self.desk = Desk(plan.placement, plan.trace, self.seat, groups, modules)
        self._terms = {term.name: term.coeff for term in plan.top.of_kind("term")}

    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank keeps and steps, by name; replicas of a block have the same."""
        own = self.plan.top.of_kind("parameters")
        names = {function.name for function in own if function.pool == self.seat.pool}
        kept: Modules = {k: m for k, m in self.desk.modules.items() if k[0] in names}
        return dict(made.trained(kept))

    def step(self, step: int, lanes: Lanes | None = None) -> Told:
        """Makes one step; each owned parameter's `grad` is that of the first lane."""
        desk = self.desk
        desk.begin(step, lanes or Lanes.training(self._terms))
        told = Told({}, {})
        for act in self.plan.sequence:
            if act.kind == "log":
                told = Told(*cast(Log, self.plan.arrows[act.name]).run(desk))
            else:
                self._do(act)
        for name, parameter in self.owned().items():
            parameter.grad = desk.param_grads[name][0].clone()
        return told

    def _do(self, act: Act) -> None:
        arrow = self.plan.arrows.get(act.name)
        if act.kind == "rows":
            compute.rows(self.desk)
        elif act.kind in ("value", "term", "back"):
            self._compute(act)
        else:
            assert arrow is not None, act
            cast("_Runs", arrow).run(self.desk)

    def _compute(self, act: Act) -> None:
        function = self.plan.top.functions[act.name]
        if function.pool != self.seat.pool:
            return
        if act.kind == "value":
            compute.value(self.desk, function)
        elif act.kind == "back":
            compute.back(self.desk, function)
        else:
            arrows = self.plan.arrows
            compute.term(
                self.desk,
                function,
                cast(Count, arrows[count_name(act.name)]),
                cast("Once | None", arrows.get(once_name(act.name))),
                cast("GlobalSum | None", arrows.get(sum_name(act.name))),
            )


class _Runs(Arrow):
    """What is run on a desk."""

    def run(self, desk: Desk) -> None: ...


def _here(top: Topology, placement: Placement, seat: Seat) -> dict[str, dict[str, tuple[str, ...]]]:
    """Which items of which parameters a rank has: its own block's, and all that it borrows."""
    asked = {
        name
        for function in top.functions.values()
        if function.pool == seat.pool and function.kind in ("value", "term")
        for name in function.asks
    }
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for function in top.of_kind("parameters"):
        if function.pool == seat.pool:
            found[function.name] = {k: tuple(v) for k, v in placement.items(seat).items()}
        elif function.name in asked:
            found[function.name] = {axis.name: axis.items for axis in top.axes.values()}
    return found
