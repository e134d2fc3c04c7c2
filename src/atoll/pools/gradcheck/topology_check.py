"""The check of a topology: one process against ranks at several sizes, and its mutants."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.layout import Span
from atoll.pools import made, plan_checks, threads, trace
from atoll.pools.gradcheck import compare, kills, trial
from atoll.pools.gradcheck.defects import Run
from atoll.pools.gradcheck.mutants import catalogue
from atoll.pools.gradcheck.mutants.base import Facts
from atoll.pools.gradcheck.outcome import Outcome, Size
from atoll.pools.gradcheck.report import Kill
from atoll.pools.plan import Plan, planned
from atoll.pools.reference import Reference
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace


class Ranks(Protocol):
    """Where the ranks of a trial are: threads of this process, or processes."""

    def run(
        self, plan: Plan, weights: Mapping[str, Tensor], *, steps: int, mutant: str | None = None
    ) -> list[Outcome]:
        """What they leave after each step, with a mutant of the plan where one is named."""
        ...


class ThreadRanks:
    """All ranks in this process."""

    def run(
        self, plan: Plan, weights: Mapping[str, Tensor], *, steps: int, mutant: str | None = None
    ) -> list[Outcome]:
        """Also of a plan that was changed."""
        mutated = plan if mutant is None else _mutated(plan, mutant)
        left = threads.on_threads(
            plan.placement,
            lambda rank, groups: trial.on_rank(mutated, groups, weights, rank=rank, steps=steps),
        )
        return trial.joined(plan.placement, left)


def _mutated(plan: Plan, name: str) -> Plan:
    (mutant,) = [one for one in catalogue.of(plan) if one.name == name]
    return mutant.change(plan)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the trials of a topology have shown."""

    runs: tuple[Run, ...]
    kills: tuple[Kill, ...]
    remarks: tuple[str, ...]
    no_verdicts: tuple[str, ...]


class TopologyCheck:
    """One declaration, one reference, and trials at each of its sizes."""

    def __init__(self, top: Topology, *, tolerance: float, steps: int = 2) -> None:
        self.top = top
        self.tolerance = tolerance
        self.steps = steps
        self.weights = made.initial(top)
        self.trace: Trace = trace.traced(top, self.weights)
        # Checked without rounding on the way; what the wire costs stands beside it.
        self.lossless = top.with_wire(None)
        self.reference = trial.reference(self.lossless, self.weights, steps=steps)

    def at(self, top: Topology, ranks: Ranks, *, mutants: bool) -> Checked:
        """All trials at one size."""
        plan = planned(top.with_wire(None), self.trace)
        coverage = plan_checks.check(plan)
        size = size_of(top)
        found = ranks.run(plan, self.weights, steps=self.steps)
        runs = [
            Run(
                size=size,
                pairs=tuple(compare.compare(wanted, got, tolerance=self.tolerance)),
                logged=tuple(compare.compare_logged(wanted, got, tolerance=self.tolerance)),
                differing=got.differing,
                counts=wanted.counts,
                step=step + 1,
            )
            for step, (wanted, got) in enumerate(zip(self.reference, found, strict=True))
        ]
        remarks = [self._wire(top, ranks)] if top.wire is not None else []
        killed: list[Kill] = []
        if mutants:
            facts = Facts(plan, coverage, self.weights)
            for mutant in catalogue.of(plan):
                left = ranks.run(plan, self.weights, steps=mutant.steps, mutant=mutant.name)
                wanted = self.reference[mutant.steps - 1]
                killed.append(kills.judged(mutant, facts, wanted, left[-1], size=size.label))
        return Checked(tuple(runs), tuple(killed), tuple(remarks), ())

    def _wire(self, top: Topology, ranks: Ranks) -> str:
        plan = planned(top, self.trace)
        (left,) = ranks.run(plan, self.weights, steps=1)
        pairs = compare.compare(self.reference[0], left, tolerance=self.tolerance)
        worst = max((pair.error for pair in pairs if pair.cosine is not None), default=0.0)
        return f"the production wire ({top.wire}) at {size_of(top).label}: error {worst:.2g}"

    def counts(self, sizes: Sequence[Topology]) -> tuple[list[str], list[str]]:
        """Remarks and reasons for no verdict: whether ranks hold different counts anywhere."""
        remarks: list[str] = []
        reasons: list[str] = []
        uneven: list[str] = []
        one = Reference(self.lossless, self.weights)
        for term in self.top.of_kind("term"):
            if term.once:
                continue
            rows = [_count(one, term.name, Span(k, k + 1)) for k in range(self.top.num_rows)]
            at_sizes = [_by_rank(rows, top.pools[term.pool].ranks) for top in sizes]
            if any(len(set(counts)) > 1 for counts in at_sizes):
                uneven.append(term.name)
            elif len(set(rows)) > 1:
                reasons.append(
                    f"no verdict: rows count differently for term {term.name!r}, and every rank "
                    f"holds the same at every size; change the rows or the sizes"
                )
            else:
                remarks.append(
                    f"no verdict on counts: every rank has the same count of {term.name!r}"
                )
        if not uneven and not reasons:
            reasons.append(
                "no verdict on counts: no term counts differently on two ranks at any size; give "
                "rows of different length, or a local count would look right"
            )
        return remarks, reasons


def _count(one: Reference, term: str, rows: Span) -> int:
    return one.part(0, rows, [term])[term].count


def _by_rank(rows: Sequence[int], ranks: int) -> list[int]:
    each = len(rows) // ranks
    return [sum(rows[k * each : (k + 1) * each]) for k in range(ranks)]


def size_of(top: Topology) -> Size:
    """What the sizes are called, in the order of the pools."""
    shared = [axis.over for axis in top.axes.values()]
    symbols: dict[str, int] = {}
    parts: list[str] = []
    for name, pool in top.pools.items():
        symbols[f"n_{name}"] = pool.size
        if name not in shared:
            parts.append(f"{pool.ranks}")
            continue
        parts.append(f"{pool.blocks}x{pool.ranks}")
        suffix = "" if len(shared) == 1 else f"_{name}"
        symbols[f"n_per_block{suffix}"] = pool.ranks
        symbols[f"n_blocks{suffix}"] = pool.blocks
    return Size(f"({', '.join(parts)})", symbols)


def sizes_of(top: Topology) -> list[Topology]:
    """The declared sizes and those that the file adds; else one more that follows from the rows."""
    if top.sizes:
        return [top, *(top.sized(**sizes) for sizes in top.sizes)]
    return [top, *_others(top)]


def _others(top: Topology) -> Iterator[Topology]:
    """Up to two other sizes: each pool as it is not now, as far as the geometry lets it."""
    found = 0
    divisors = [n for n in range(1, top.num_rows + 1) if top.num_rows % n == 0 and n <= 6]
    for shift in range(1, len(divisors)):
        given = {}
        for place, (name, pool) in enumerate(top.pools.items()):
            ranks = divisors[(_near(divisors, pool.ranks) + shift + place) % len(divisors)]
            given[name] = (pool.blocks, ranks) if pool.blocks > 1 else ranks
        other = top.sized(**given)
        if found < 2 and _fits(other):
            found += 1
            yield other


def _near(divisors: Sequence[int], ranks: int) -> int:
    return min(range(len(divisors)), key=lambda k: abs(divisors[k] - ranks))


def _fits(top: Topology) -> bool:
    """Whether rows divide on all edges; shapes do not matter to that."""
    pools = list(top.pools.values())
    return (
        all(
            one.ranks % two.ranks == 0 or two.ranks % one.ranks == 0
            for one in pools
            for two in pools
        )
        and sum(pool.size for pool in pools) <= 16
    )
