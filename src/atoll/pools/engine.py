"""One rank at work: goes through a plan's sequence, computing and running arrows.

Knows nothing of optimizers: what a step leaves are gradients on the owners of parameters.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from atoll.collectives.base import Collectives, Key
from atoll.errors import ConfigError
from atoll.pools import canary, compute, made
from atoll.pools.arrows.base import Arrow
from atoll.pools.arrows.terms import Count, GlobalSum, Log, Once
from atoll.pools.coverage import Coverage
from atoll.pools.desk import GROUP, Desk
from atoll.pools.lanes import Lanes
from atoll.pools.placement import Placement, Seat
from atoll.pools.plan import Act, Plan, count_name, once_name, sum_name
from atoll.pools.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """What every rank knows of a step that was made."""

    losses: Mapping[str, float]  # of each term, with its coefficient
    counts: Mapping[str, int]
    norms: Mapping[str, float]  # of each lane's gradient, where the canary crossed


class Engine:
    """One rank of a topology; all ranks of its world call `step` together.

    `groups` are this rank's collectives: of the world, of its pool and of its block. With
    `canary_every` = k each k-th step, the first one too, proves that its gradients are whole, and
    logs the norm of each term's. Not for several threads.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, Collectives],
        weights: Mapping[str, Tensor],
        *,
        rank: int,
        coverage: Coverage | None = None,
        canary_every: int = 0,
    ) -> None:
        self.plan = plan
        self.seat = plan.placement.seats[rank]
        self.canary_every = canary_every
        modules = made.modules(plan.top, _here(plan.top, plan.placement, self.seat))
        made.fill(modules, weights)
        self.desk = Desk(plan.placement, plan.trace, self.seat, groups, modules)
        self._coeffs = {term.name: term.coeff for term in plan.top.of_kind("term")}
        self._last = -1  # step
        self._extra = 0  # exchanges of it that are no arrow
        self._coverage = coverage or (Coverage(plan) if canary_every else None)

    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank keeps and steps, by name; replicas of a block have the same."""
        return self.desk.owned

    def next_key(self) -> Key:
        """For an exchange of the step that is no arrow of the plan: clipping, canary, norms."""
        self._extra += 1
        return Key(group=GROUP, step=self.desk.step + 1, op="control", unit=self._extra)

    def step(self, step: int, lanes: Lanes | None = None) -> Told:
        """Makes one step; each owned parameter's `grad` is that of the first lane.

        Steps are numbered upwards, with gaps if need be: the number tells messages apart.
        """
        if step <= self._last:
            raise ConfigError(
                f"step={step} follows step {self._last}; steps are numbered from 0 upwards, and "
                f"none is made twice"
            )
        self._last, self._extra = step, 0
        is_counting = bool(self.canary_every) and step % self.canary_every == 0
        alone = Lanes.each_alone if is_counting else Lanes.training
        desk = self.desk
        desk.begin(step, lanes or alone(self._coeffs), is_counting=is_counting)
        for act in self.plan.sequence[:-1]:
            self._do(act)
        told = self._told(self.plan.sequence[-1])
        for name, parameter in self.owned().items():
            parameter.grad = desk.param_grads[name][0].clone()
        return told

    def _told(self, act: Act) -> Told:
        losses, counts = cast(Log, self.plan.arrows[act.name]).run(self.desk)
        if self._coverage is None or not self.desk.is_counting:
            return Told(losses, counts, {})
        canary.check(self.desk, self._coverage, self.next_key())
        norms = canary.norms(self.desk, self.next_key())
        if self.seat.rank == 0:
            shown = {name: round(norm, 6) for name, norm in norms.items()}
            log.info("term norms", extra={"step": self.desk.step, "norms": shown})
        return Told(losses, counts, norms)

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
    named = {
        name
        for function in top.functions.values()
        if function.pool == seat.pool and function.kind in ("value", "term")
        for name in function.asks
    }
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for function in top.of_kind("parameters"):
        if function.pool == seat.pool:
            found[function.name] = {k: tuple(v) for k, v in placement.items(seat).items()}
        elif function.name in named:
            found[function.name] = {axis.name: axis.items for axis in top.axes.values()}
    return found
