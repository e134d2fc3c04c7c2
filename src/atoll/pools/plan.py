"""The plan of a step: one object for each arrow, and the order in which all ranks go through them.

Derived from the declaration, the placement and the shapes of values; holds no tensor. All ranks
follow one sequence, each doing its own part, so no two can wait for each other in a circle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atoll.errors import ConfigError
from atoll.pools import made, routes
from atoll.pools.arrows.base import Arrow, Meeting
from atoll.pools.arrows.edges import GradientEdge, ValueEdge
from atoll.pools.arrows.publication import Publication, Sheet
from atoll.pools.arrows.reductions import Reduce, Return, Returned
from atoll.pools.arrows.terms import Count, GlobalSum, Log, Once
from atoll.pools.calls import Item
from atoll.pools.declared import Function
from atoll.pools.placement import Placement, Seat
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace

LOG = "log"
Kind = Literal[
    "publish", "rows", "value", "send", "term", "gradient", "back", "return", "reduce", "log"
]


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that the sequence has ranks do: run an arrow, or compute a function."""

    kind: Kind
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`arrows` by name; `sequence` says who is run when; `tensors` are what is trained."""

    placement: Placement
    trace: Trace
    arrows: Mapping[str, Arrow]
    sequence: tuple[Act, ...]
    tensors: Mapping[str, tuple[str, ...]]  # names by module

    @property
    def top(self) -> Topology:
        return self.placement.top

    def replaced(self, *changed: Arrow) -> "Plan":
        """The same plan with other objects in the place of those of their names."""
        unknown = [arrow.name for arrow in changed if arrow.name not in self.arrows]
        if unknown:
            raise ConfigError(f"arrows {unknown} are not in the plan; it has {list(self.arrows)}")
        return replace(self, arrows={**self.arrows, **{arrow.name: arrow for arrow in changed}})

    def meetings(self) -> list[Meeting]:
        """All exchanges of a step, in the order in which ranks come to them."""
        found: list[Meeting] = []
        for act in self.sequence:
            for arrow in self.of_act(act):
                found.extend(arrow.meetings())
        return found

    def of_act(self, act: Act) -> list[Arrow]:
        """The arrows of one act."""
        if act.kind in ("rows", "value", "back"):
            return []  # computed by each rank alone, whatever its name
        if act.kind != "term":
            return [self.arrows[act.name]]
        names = [name(act.name) for name in (count_name, sum_name)]
        return [self.arrows[name] for name in names if name in self.arrows]


def count_name(term: str) -> str:
    """How a term's count is called in a plan."""
    return f"count {term}"


def sum_name(term: str) -> str:
    """How a term's global sum is called."""
    return f"sum {term}"


def once_name(term: str) -> str:
    """How the choice of who contributes a term is called."""
    return f"once {term}"


def planned(top: Topology, trace: Trace) -> Plan:
    """The plan of a topology at its sizes; ConfigError where the sizes do not fit together."""
    placement = Placement(top)
    derived = _Derived(top, placement, trace)
    arrows = list(derived.arrows())
    numbered = {arrow.name: replace(arrow, unit=unit) for unit, arrow in enumerate(arrows)}
    tensors = {made.prefix(key): names for key, names in derived.tensors.items()}
    return Plan(placement, trace, numbered, tuple(derived.sequence(numbered)), tensors)


class _Derived:
    """What follows from who asks for what."""

    def __init__(self, top: Topology, placement: Placement, trace: Trace) -> None:
        self.top = top
        self.placement = placement
        self.trace = trace
        self.computed = [f for f in top.functions.values() if f.kind in ("value", "term")]
        shapes = made.modules(top, made.everywhere(top))
        self.tensors: dict[tuple[str, Item], tuple[str, ...]] = {
            key: tuple(name for name, _ in made.trained({key: module}))
            for key, module in shapes.items()
        }

    def arrows(self) -> Iterator[Arrow]:
        for owner in self.top.pools:
            for pool in self.top.pools:
                if pool != owner and self.borrowed(pool, owner):
                    yield self.publication(owner, pool)
                    yield self.returned(pool, owner)
        for value in self.top.of_kind("value"):
            for pool in self.consumers(value):
                yield from self.edges(value, pool)
        for term in self.top.of_kind("term"):
            yield from self.of_term(term)
        for pool in self.top.pools:
            if any(function.pool == pool for function in self.top.of_kind("parameters")):
                yield self.reduction(pool)
        yield Log(name=LOG, ranks=tuple(range(self.placement.size)))

    def sequence(self, arrows: Mapping[str, Arrow]) -> Iterator[Act]:
        def of(kind: type[Arrow], word: Kind, value: str | None = None) -> Iterator[Act]:
            for arrow in arrows.values():
                if type(arrow) is kind and (value is None or getattr(arrow, "value", "") == value):
                    yield Act(word, arrow.name)

        yield from of(Publication, "publish")
        yield Act("rows")
        values = self.top.of_kind("value")
        for value in values:
            yield Act("value", value.name)
            yield from of(ValueEdge, "send", value.name)
        for term in self.top.of_kind("term"):
            yield Act("term", term.name)
        for value in reversed(values):
            yield from of(GradientEdge, "gradient", value.name)
            yield Act("back", value.name)
        yield from of(Returned, "return")
        yield from of(Reduce, "reduce")
        yield Act("log", LOG)

    # Who needs what

    def borrowed(self, pool: str, owner: str) -> list[tuple[str, Item]]:
        """Modules of `owner` that functions on `pool` ask for, if anything of them is trained."""
        named = {name for f in self.computed if f.pool == pool for name in f.asks}
        return [
            key
            for key, names in self.tensors.items()
            if names and key[0] in named and self.top.functions[key[0]].pool == owner
        ]

    def consumers(self, value: Function) -> list[str]:
        """Pools other than its own whose functions ask for a value."""
        return [
            pool
            for pool in self.top.pools
            if pool != value.pool
            and any(f.pool == pool and value.name in f.asks for f in self.computed)
        ]

    def owned(self, seat: Seat) -> list[tuple[str, Item]]:
        """Modules that a rank keeps and steps."""
        here = self.placement.items(seat)
        return [
            (name, item)
            for name, item in self.tensors
            if (function := self.top.functions[name]).pool == seat.pool
            and (item is None or item in here[str(function.axis)])
        ]

    # One arrow each

    def publication(self, owner: str, pool: str) -> Publication:
        wanted = self.borrowed(pool, owner)
        return Publication(
            name=f"publish {owner} -> {pool}",
            sheets=tuple(
                Sheet(source.rank, to.rank, self._names(source, wanted))
                for source in self.placement.firsts(owner)
                for to in self.placement.of(pool)
                if self._names(source, wanted)
            ),
        )

    def returned(self, pool: str, owner: str) -> Returned:
        wanted = self.borrowed(pool, owner)
        return Returned(
            name=f"return {pool} -> {owner}",
            pool=pool,
            source=self.placement.first(pool).rank,
            ranks=tuple(seat.rank for seat in self.placement.of(pool)),
            returns=tuple(
                Return(
                    to.rank,
                    tuple(made.prefix(key) for key in self.owned(to) if key in wanted),
                    self._names(to, wanted),
                )
                for to in self.placement.firsts(owner)
                if self._names(to, wanted)
            ),
        )

    def _names(self, seat: Seat, wanted: Sequence[tuple[str, Item]]) -> tuple[str, ...]:
        return tuple(
            name for key in self.owned(seat) if key in wanted for name in self.tensors[key]
        )

    def edges(self, value: Function, pool: str) -> Iterator[Arrow]:
        routes.check_edge(value.name, self.top.pools[value.pool], self.top.pools[pool])
        spec = self.trace.values[value.name]
        way = tuple(routes.routes(self.placement, spec, value.pool, pool))
        for kind, word, ends in (
            (ValueEdge, "value", f"{value.pool} -> {pool}"),
            (GradientEdge, "gradient", f"{pool} -> {value.pool}"),
        ):
            yield kind(
                name=f"{word} {value.name} {ends}",
                value=value.name,
                source=value.pool,
                to=pool,
                routes=way,
                wire=self.top.wire,
            )

    def of_term(self, term: Function) -> Iterator[Arrow]:
        axis = None if term.axis is None else self.top.axes[term.axis]
        ranks = tuple(seat.rank for seat in self.placement.of(term.pool))
        yield Count(
            name=count_name(term.name),
            pool=term.pool,
            ranks=ranks,
            items=(None,) if axis is None else axis.items,
        )
        if term.once:
            yield Once(name=once_name(term.name))
        if term.name in self.trace.through:
            by_block = axis is not None and axis.over == term.pool
            groups = self.placement.groups()
            names = (
                [g for g in groups if g.startswith(f"{term.pool}/")] if by_block else [term.pool]
            )
            yield GlobalSum(
                name=sum_name(term.name),
                groups={name: tuple(groups[name]) for name in names},
                by_block=by_block,
            )

    def reduction(self, pool: str) -> Reduce:
        groups = self.placement.groups()
        seats = self.placement.of(pool)
        return Reduce(
            name=f"reduce {pool}",
            pool=pool,
            blocks={seat.block_group: tuple(groups[seat.block_group]) for seat in seats},
            modules={s.rank: tuple(map(made.prefix, self.owned(s))) for s in seats},
            tensors={
                s.rank: tuple(name for key in self.owned(s) for name in self.tensors[key])
                for s in seats
            },
        )
