"""Whether every rank gets what its functions ask for, before they run, and each thing once.

Values by row and item, parameters by tensor, the counts and sums of terms; followed on paper like
the gradients, which `coverage` follows.
"""

from collections import Counter
from collections.abc import Iterator

from atoll.errors import ConfigError
from atoll.pools import calls, made
from atoll.pools.arrows.edges import ValueEdge
from atoll.pools.arrows.publication import Publication
from atoll.pools.arrows.reductions import Reduce, Returned
from atoll.pools.arrows.terms import Count, GlobalSum, Once
from atoll.pools.calls import Item
from atoll.pools.declared import Function
from atoll.pools.placement import Seat
from atoll.pools.plan import Plan, count_name, once_name, sum_name


def check(plan: Plan) -> None:
    """ConfigError naming the rank and the value, parameter or term at fault."""
    done: list[str] = []  # arrows, in the order in which they are run
    for act in plan.sequence:
        if act.kind in ("value", "term"):
            function = plan.top.functions[act.name]
            for seat in plan.placement.of(function.pool):
                _check_values(plan, function, seat, done)
                _check_parameters(plan, function, seat, done)
        elif act.name in plan.arrows:
            done.append(act.name)
    for term in plan.top.of_kind("term"):
        _check_term(plan, term)
    for name, listed, wanted in _listed(plan):
        if Counter(listed) != Counter(wanted):
            raise ConfigError(
                f"{name!r} carries tensors {listed}; what its modules train is {wanted}, and each "
                f"crosses once"
            )


def _check_values(plan: Plan, function: Function, seat: Seat, done: list[str]) -> None:
    for name in function.asks:
        asked = plan.top.functions.get(name)
        if asked is None or asked.kind != "value" or asked.pool == function.pool:
            continue
        spec = plan.trace.values[name]
        whole = plan.placement.items(seat)
        items: list[Item] = [None] if spec.axis is None else list(whole[spec.axis])
        found = Counter(_arrivals(plan, name, seat, done))
        rows = range(seat.rows.start, seat.rows.stop)
        wanted = Counter((item, row) for item in items for row in rows)
        if found != wanted:
            (item, row), often = min((k, found[k]) for k in found | wanted if found[k] != wanted[k])
            raise ConfigError(
                f"value {name!r}{calls.of(item)} reaches rank {seat.rank} of pool {seat.pool!r}, "
                f"for {function.name!r}, {often} times in row {row}; each of its rows "
                f"[{seat.rows.start}, {seat.rows.stop}) and items must arrive once"
            )


def _arrivals(plan: Plan, value: str, seat: Seat, done: list[str]) -> Iterator[tuple[Item, int]]:
    """Items and rows that come from a rank that computes them."""
    for name in done:
        edge = plan.arrows[name]
        if not isinstance(edge, ValueEdge) or edge.value != value:
            continue
        for route in edge.routes:
            source = plan.placement.seats[route.source]
            if route.to != seat.rank or source.pool != plan.top.functions[value].pool:
                continue
            start, stop = max(route.rows.start, source.rows.start), route.rows.stop
            for item in route.items:
                if _has(plan, source, plan.trace.values[value].axis, item):
                    yield from ((item, row) for row in range(start, min(stop, source.rows.stop)))


def _has(plan: Plan, seat: Seat, axis: str | None, item: Item) -> bool:
    return axis is None or item in plan.placement.items(seat)[axis]


def _check_parameters(plan: Plan, function: Function, seat: Seat, done: list[str]) -> None:
    for module, name, axis, item in _borrowed(plan, function):
        sources = [
            sheet.source
            for arrow in (plan.arrows[one] for one in done)
            if isinstance(arrow, Publication)
            for sheet in arrow.sheets
            if sheet.to == seat.rank and name in sheet.tensors
        ]
        owner = plan.top.functions[module].pool
        seats = [plan.placement.seats[rank] for rank in sources]
        fit = [s for s in seats if s.pool == owner and _has(plan, s, axis, item) and s.is_first]
        if len(fit) != 1 or len(seats) != 1:
            raise ConfigError(
                f"parameter {name!r} is published to rank {seat.rank} of pool {seat.pool!r}, for "
                f"{function.name!r}, by ranks {sources}; one must, the first replica of its owner"
            )


def _borrowed(plan: Plan, function: Function) -> Iterator[tuple[str, str, str | None, Item]]:
    """Trained tensors of other pools that a function asks for."""
    for name in function.asks:
        asked = plan.top.functions.get(name)
        if asked is None or asked.kind != "parameters" or asked.pool == function.pool:
            continue
        items: list[Item] = [None]
        if asked.axis is not None:
            items = list(plan.top.axes[asked.axis].items)
        for item in items:
            for tensor in plan.tensors[made.prefix((name, item))]:
                yield name, tensor, asked.axis, item


def _check_term(plan: Plan, term: Function) -> None:
    """Counted over all of the pool that computes it; bent over the ranks that share its rows."""
    count = plan.arrows.get(count_name(term.name))
    items: tuple[Item, ...] = (None,) if term.axis is None else plan.top.axes[term.axis].items
    ranks = tuple(seat.rank for seat in plan.placement.of(term.pool))
    if not isinstance(count, Count) or (count.pool, count.ranks, count.items) != (
        *(term.pool, ranks),
        items,
    ):
        raise ConfigError(
            f"term {term.name!r} is not counted over all ranks {list(ranks)} of pool "
            f"{term.pool!r} and all items {list(items)}; its one count is theirs"
        )
    is_once = isinstance(plan.arrows.get(once_name(term.name)), Once)
    if is_once != term.once:
        raise ConfigError(
            f"term {term.name!r} has once={term.once}, and the plan has once={is_once}"
        )
    if (term.name in plan.trace.through) != (sum_name(term.name) in plan.arrows):
        raise ConfigError(f"term {term.name!r} is a Through and has no global sum, or the reverse")
    total = plan.arrows.get(sum_name(term.name))
    if isinstance(total, GlobalSum):
        axis = plan.top.axis_over(term.pool)
        if total.by_block != (axis is not None and axis.name == term.axis):
            raise ConfigError(
                f"the global sum of term {term.name!r} has by_block={total.by_block}; it is taken "
                f"over the ranks that share the rows of an item out"
            )


def _listed(plan: Plan) -> Iterator[tuple[str, list[str], list[str]]]:
    """Tensors that reductions and returns say they carry, and those of the modules they name."""

    def of(modules: tuple[str, ...]) -> list[str]:
        return [name for module in modules for name in plan.tensors[module]]

    for arrow in plan.arrows.values():
        if isinstance(arrow, Returned):
            for one in arrow.returns:
                yield arrow.name, list(one.tensors), of(one.modules)
        elif isinstance(arrow, Reduce):
            for rank, modules in arrow.modules.items():
                yield arrow.name, list(arrow.tensors[rank]), of(modules)
