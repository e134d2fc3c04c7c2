"""The check of a topology: one process against ranks at several sizes, and its mutants."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools import made, plan_checks, trace
from atoll.pools.gradcheck import compare, kills, loading, sizes, topology_counts, trial
from atoll.pools.gradcheck.asked import Asked
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.defects import Run
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.mutants import catalogue
from atoll.pools.gradcheck.mutants.base import Facts, Mutant
from atoll.pools.gradcheck.report import Kill, Report
from atoll.pools.gradcheck.topology_ranks import CrewRanks, Ranks, ThreadRanks
from atoll.pools.plan import Plan, planned
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace

TOLERANCE = 1e-12  # of ratio and error in float64; a deeper model restates it


def check_topology(subject: object, place: Place | None, asked: Asked, crews: Crews) -> Report:
    """All its terms, and each alone, at every size, step after step; then its mutants."""
    assert isinstance(subject, Topology), type(subject)
    with loading.default_dtype(torch.float64):
        with loading.users("the topology's functions"):
            checked = TopologyCheck(subject, steps=asked.steps)
        return checked.report(_ranks(asked, place, crews), asked)


def _ranks(asked: Asked, place: Place | None, crews: Crews) -> Ranks:
    if asked.ranks != "gloo":
        return ThreadRanks()
    if place is None:
        raise ConfigError(
            "ranks='gloo' is asked of a Topology that stands in no file; make it at the top level "
            "of one, so that processes can load it"
        )
    return CrewRanks(crews, place)


class TopologyCheck:
    """One declaration and its reference, to be compared with ranks at any size.

    Values and gradients travel as they are; what a wire that rounds costs stands beside it.
    """

    def __init__(self, top: Topology, *, steps: int = 2, tolerance: float = TOLERANCE) -> None:
        self.top = top.with_wire(None)
        self.wire = top.wire
        self.steps = steps
        self.tolerance = tolerance
        self.weights: Mapping[str, Tensor] = made.initial(top)
        self.trace: Trace = trace.traced(top, self.weights)
        # Mutants that are a step old show in the second.
        self.reference = trial.reference(self.top, self.weights, steps=max(steps, 2))

    def report(self, ranks: Ranks, asked: Asked) -> Report:
        """Everything that was asked for."""
        at = sizes.of(self.top, self.trace, asked.sizes)
        plans = [self.planned(top) for top in at]
        evenness = topology_counts.judged(self.top, self.weights, at)
        runs: list[Run] = []
        killed: list[Kill] = []
        remarks = list(evenness.remarks)
        for plan in plans:
            label = sizes.named(plan.top).label
            asked.progress(label)
            runs += self.runs(plan, ranks)
            if self.wire is not None:
                remarks.append(self.rounded(plan, ranks))
        alike = [] if asked.mutants else self.alike(plans)
        for plan in plans if asked.mutants else ():
            killed += self.kills(plan, ranks, asked)
        return Report(
            "topology",
            tuple(runs),
            tolerance=self.tolerance,
            remarks=tuple(remarks),
            no_verdicts=(*evenness.no_verdicts, *alike),
            kills=tuple(killed),
        )

    def planned(self, top: Topology) -> Plan:
        """The plan at one size, checked on paper."""
        plan = planned(top, self.trace)
        plan_checks.check(plan)
        return plan

    def runs(self, plan: Plan, ranks: Ranks) -> Sequence[Run]:
        """Each step at one size, compared."""
        found = ranks.run(plan, self.weights, steps=self.steps)
        return [
            Run(
                size=sizes.named(plan.top),
                pairs=tuple(compare.compare(wanted, got, tolerance=self.tolerance)),
                logged=tuple(compare.compare_logged(wanted, got, tolerance=self.tolerance)),
                differing=got.differing,
                counts=wanted.counts,
                step=step,
            )
            for step, (wanted, got) in enumerate(
                zip(self.reference[: self.steps], found, strict=True), 1
            )
        ]

    def rounded(self, plan: Plan, ranks: Ranks) -> str:
        """What the wire of production costs, in a sentence."""
        wired = planned(plan.top.with_wire(self.wire), self.trace)
        (left,) = ranks.run(wired, self.weights, steps=1)
        pairs = compare.compare(self.reference[0], left, tolerance=self.tolerance)
        worst = max((pair.error for pair in pairs if pair.cosine is not None), default=0.0)
        label = sizes.named(plan.top).label
        return f"with {self.wire} on the wire, at {label}: worst error {worst:.2g}"

    def alike(self, plans: Sequence[Plan]) -> list[str]:
        """Mistakes that none of these sizes would show, by what they predict of themselves."""
        hidden: dict[str, bool] = {}
        for plan in plans:
            facts = Facts(plan, plan_checks.check(plan), self.weights)
            for mutant in _mutants(facts):
                if hidden.get(mutant.name, True):  # one size that shows it is enough
                    wanted = self.reference[mutant.steps - 1]
                    hidden[mutant.name] = kills.is_same(mutant, facts, wanted)
        return [
            f"no verdict: mutant {name!r} is the same program at every size; run another size"
            for name, is_hidden in hidden.items()
            if is_hidden
        ]

    def kills(self, plan: Plan, ranks: Ranks, asked: Asked) -> Sequence[Kill]:
        """Each mutant at one size, judged by the table that it states."""
        facts = Facts(plan, plan_checks.check(plan), self.weights)
        label = sizes.named(plan.top).label
        found: list[Kill] = []
        # What leads to no trained tensor cannot be wrong on one.
        mutants = _mutants(facts)
        for number, mutant in enumerate(mutants, 1):
            asked.progress(f"{label}, mutant {number} of {len(mutants)}: {mutant.name}")
            left = ranks.run(plan, self.weights, steps=mutant.steps, mutant=mutant.name)
            wanted = self.reference[mutant.steps - 1]
            found.append(kills.judged(mutant, facts, wanted, left[-1], size=label))
        return found


def _mutants(facts: Facts) -> list[Mutant]:
    """Those that change anything at any size: one with an empty table is the right program."""
    return [mutant for mutant in catalogue.of(facts.plan) if mutant.table(facts)]
