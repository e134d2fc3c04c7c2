"""Which rows of which terms reach each owner: a plan followed on paper, before anything runs.

A gradient is followed from the call that makes it. What is followed is a share: rows of one call
of a term, and the calls of values that it came through. A parameter may be reached in several ways;
in each of them every share must arrive once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd

from atoll.layout import Span
from atoll.pools import calls, made
from atoll.pools.arrows.edges import GradientEdge
from atoll.pools.arrows.reductions import Reduce, Returned
from atoll.pools.arrows.terms import Once
from atoll.pools.calls import Item
from atoll.pools.declared import Function
from atoll.pools.placement import Seat
from atoll.pools.plan import Plan, once_name
from atoll.pools.routes import Route

Call = tuple[str, Item]  # function and item


@dataclass(frozen=True, slots=True)
class Way:
    """From a term's call back through values, each with the item that it was asked for."""

    term: Call
    through: tuple[Call, ...] = ()


Rows = Counter[tuple[Way, int]]  # how often a way's gradient has each grain of rows

NO_ROW = -1  # what a term that is the same on all replicas is over


@dataclass(slots=True)
class Sheet:
    """What one rank would have on its desk."""

    seat: Seat
    leaves: dict[tuple[str, Item], Rows] = field(default_factory=dict)
    modules: dict[str, Rows] = field(default_factory=dict)


class Coverage:
    """Follows a plan's gradients; `sheets` are what every rank ends with."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.top = plan.top
        self.sheets = [Sheet(seat) for seat in plan.placement.seats]
        # All pools cut the rows at multiples of this, so rows between two of them go together.
        self.grain = gcd(*(len(seat.rows) for seat in plan.placement.seats))
        for act in plan.sequence:
            if act.kind == "term":
                self._term(self.top.functions[act.name])
            elif act.kind == "back":
                self._back(self.top.functions[act.name])
            elif act.kind in ("gradient", "return", "reduce"):
                arrow = plan.arrows[act.name]
                if isinstance(arrow, GradientEdge):
                    self._edge(arrow)
                elif isinstance(arrow, Returned):
                    self._returned(arrow)
                elif isinstance(arrow, Reduce):
                    self._reduce(arrow)

    def of(self, rank: int, module: str) -> Rows:
        """What the gradients of a module are over, on one rank, in the end."""
        return self.sheets[rank].modules.get(module, Counter())

    def wanted(self, key: tuple[str, Item]) -> Rows:
        """The same for one process that calls everything once on all rows."""
        found: Rows = Counter()
        for term in self.top.of_kind("term"):
            for call in self._calls(term):
                for way in self._ways(Way(call), term, call[1], key):
                    found.update(self._rows(way, Span(0, self.top.num_rows), term))
        return found

    # Ways in one process

    def _calls(self, function: Function) -> list[Call]:
        whole = {axis.name: axis.items for axis in self.top.axes.values()}
        return [(function.name, item) for item in calls.items(function, whole)]

    def _ways(
        self, way: Way, function: Function, item: Item, key: tuple[str, Item]
    ) -> Iterable[Way]:
        name, part = key
        axis = self.top.functions[name].axis
        if name in function.asks and part in calls.given(function, item, axis, [part]):
            yield way
        for value in self.top.of_kind("value"):
            if value.name not in function.asks:
                continue
            spec = self.plan.trace.values[value.name]
            parts = calls.given(function, item, spec.axis, list(spec.shapes))
            for leaf in parts:
                longer = Way(way.term, (*way.through, (value.name, leaf)))
                called_for = None if value.axis is None else leaf
                yield from self._ways(longer, value, called_for, key)

    # The same on ranks, arrow by arrow

    def _term(self, term: Function) -> None:
        once = self.plan.arrows.get(once_name(term.name))
        for sheet in self.sheets:
            if sheet.seat.pool != term.pool:
                continue
            if isinstance(once, Once) and not once.contributes(sheet.seat):
                continue
            for item in calls.items(term, self.plan.placement.items(sheet.seat)):
                way = Way((term.name, item))
                self._call(sheet, term, item, self._rows(way, sheet.seat.rows, term))

    def _back(self, value: Function) -> None:
        for sheet in self.sheets:
            if sheet.seat.pool != value.pool:
                continue
            for item in calls.items(value, self.plan.placement.items(sheet.seat)):
                longer: Rows = Counter()
                for leaf, rows in sheet.leaves.items():
                    if leaf[0] == value.name and (item is None or leaf[1] == item):
                        for (way, row), often in rows.items():
                            longer[Way(way.term, (*way.through, leaf)), row] += often
                self._call(sheet, value, item, longer)

    def _call(self, sheet: Sheet, function: Function, item: Item, rows: Rows) -> None:
        for name in function.asks:
            if name in self.plan.trace.values:
                spec = self.plan.trace.values[name]
                for part in calls.given(function, item, spec.axis, list(spec.shapes)):
                    sheet.leaves.setdefault((name, part), Counter()).update(rows)
        for key in self._modules(function, item):
            sheet.modules.setdefault(made.prefix(key), Counter()).update(rows)

    def _modules(self, function: Function, item: Item) -> list[tuple[str, Item]]:
        found: list[tuple[str, Item]] = []
        for name in function.asks:
            asked = self.top.functions.get(name)
            if asked is not None and asked.kind == "parameters":
                parts = [call[1] for call in self._calls(asked)]
                found += [(name, k) for k in calls.given(function, item, asked.axis, parts)]
        return found

    def _edge(self, edge: GradientEdge) -> None:
        for route in edge.routes:
            for item in route.items:
                key = edge.value, item
                rows = self.sheets[route.to].leaves.get(key, Counter())
                place = self.sheets[route.source].leaves.setdefault(key, Counter())
                place.update(self._within(rows, route))

    def _returned(self, arrow: Returned) -> None:
        for one in arrow.returns:
            for module in one.modules:
                whole: Rows = Counter()
                for rank in arrow.ranks:
                    whole.update(self.of(rank, module))
                self.sheets[one.to].modules.setdefault(module, Counter()).update(whole)

    def _reduce(self, arrow: Reduce) -> None:
        for ranks in arrow.blocks.values():
            for module in arrow.modules[ranks[0]]:
                whole: Rows = Counter()
                for rank in ranks:
                    whole.update(self.of(rank, module))
                for rank in ranks:
                    self.sheets[rank].modules[module] = Counter(whole)

    # Rows

    def expected(self, rank: int, module: str) -> Mapping[str, int]:
        """How many rows of each term a canary must find in a module's gradients."""
        found: Counter[str] = Counter()
        for (way, grain), often in self.of(rank, module).items():
            found[way.term[0]] += often * (1 if grain == NO_ROW else self.grain)
        return found

    def _rows(self, way: Way, rows: Span, term: Function) -> Rows:
        grains = range(rows.start // self.grain, rows.stop // self.grain)
        return Counter({(way, grain): 1 for grain in ([NO_ROW] if term.once else grains)})

    def _within(self, rows: Rows, route: Route) -> Rows:
        first, last = route.rows.start // self.grain, route.rows.stop // self.grain
        return Counter(
            {
                key: often
                for key, often in rows.items()
                if key[1] == NO_ROW or first <= key[1] < last
            }
        )
