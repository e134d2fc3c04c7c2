"""What is refused of a plan before anything runs.

Functions get what they ask for (`deliveries`), and every share of a term reaches each owner exactly
once; nothing is declared in vain; no two ranks wait for each other in a circle, even where a send
waits for its receiver; and every arrow is one of the plan's own kinds, none of which divides.
"""

from collections.abc import Mapping, Sequence

from atoll.errors import ConfigError
from atoll.pools import deliveries
from atoll.pools.arrows.base import Meeting
from atoll.pools.arrows.edges import GradientEdge, ValueEdge
from atoll.pools.arrows.publication import Publication
from atoll.pools.arrows.reductions import Reduce, Returned
from atoll.pools.arrows.terms import Count, GlobalSum, Log, Once
from atoll.pools.calls import Item
from atoll.pools.coverage import Coverage, Rows
from atoll.pools.plan import Plan

KINDS = (Publication, ValueEdge, GradientEdge, Count, Once, GlobalSum, Returned, Reduce, Log)


def check(plan: Plan) -> Coverage:
    """The plan's coverage; ConfigError naming the arrow, term, parameter or ranks at fault."""
    check_kinds(plan)
    check_reached(plan)
    check_leaders(plan)
    deliveries.check(plan)
    coverage = Coverage(plan)
    check_covered(plan, coverage)
    ranks = range(plan.placement.size)
    meetings = plan.meetings()
    check_order({rank: [one for one in meetings if rank in one.ranks] for rank in ranks})
    return coverage


def check_kinds(plan: Plan) -> None:
    """None but the plan's own kinds of arrow: each is a copy or a SUM, and none has an average."""
    for arrow in plan.arrows.values():
        if type(arrow) not in KINDS:
            raise ConfigError(
                f"arrow {arrow.name!r} is a {type(arrow).__name__}; a plan has "
                f"{[kind.__name__ for kind in KINDS]} alone, which copy or SUM and never average"
            )


def check_reached(plan: Plan) -> None:
    """Everything that is declared leads to a term, and every pool has something to do."""
    functions = plan.top.functions.values()
    needed = {name for f in functions if f.kind in ("value", "term") for name in f.asks}
    for function in functions:
        if function.kind in ("parameters", "value", "state") and function.name not in needed:
            raise ConfigError(
                f"{function.kind} {function.name!r} is asked for by no value and no term, so "
                f"nothing reaches it; ask for it, or leave it out"
            )
    for pool in plan.top.pools:
        if not any(f.pool == pool for f in functions if f.kind in ("value", "term")):
            raise ConfigError(
                f"pool {pool!r} computes no value and no term; its ranks would have nothing to do"
            )


def check_leaders(plan: Plan) -> None:
    """What enters once enters at the first replica of a block, and is sent by one rank."""
    firsts = {seat.rank for seat in plan.placement.seats if seat.is_first}
    for arrow in plan.arrows.values():
        if isinstance(arrow, Returned):
            if arrow.source not in arrow.ranks:
                raise ConfigError(
                    f"{arrow.name!r} is sent by rank {arrow.source}, which is none of "
                    f"{list(arrow.ranks)}; one rank of pool {arrow.pool!r} speaks for it"
                )
            to = [one.to for one in arrow.returns]
            if not firsts.issuperset(to) or len(set(to)) != len(to):
                raise ConfigError(
                    f"{arrow.name!r} sends gradients to ranks {to}; they enter once, at the first "
                    f"replica of each block, which are {sorted(firsts)}"
                )
        elif isinstance(arrow, Once):
            for pool, ranks in _contributors(plan, arrow).items():
                if len(ranks) != 1:
                    raise ConfigError(
                        f"{arrow.name!r} has ranks {ranks} of block {pool} contribute what all of "
                        f"its replicas have; one must"
                    )


def _contributors(plan: Plan, once: Once) -> Mapping[str, list[int]]:
    (term,) = [t for t in plan.top.of_kind("term") if once.name == f"once {t.name}"]
    found: dict[str, list[int]] = {}
    for seat in plan.placement.of(term.pool):
        ranks = found.setdefault(seat.block_group, [])
        if once.contributes(seat):
            ranks.append(seat.rank)
    return found


def check_covered(plan: Plan, coverage: Coverage) -> None:
    """Each owner gets each share of each term exactly once, in each way that leads there."""
    for arrow in plan.arrows.values():
        if not isinstance(arrow, Reduce):
            continue
        for rank, modules in arrow.modules.items():
            for module in modules:
                if not plan.tensors[module]:
                    continue  # all of it is frozen
                _check_same(rank, module, coverage.of(rank, module), coverage.wanted(_key(module)))


def _key(module: str) -> tuple[str, Item]:
    name, _, item = module.removesuffix("]").partition("[")
    return (name, item) if item else (name, None)


def _check_same(rank: int, module: str, found: Rows, wanted: Rows) -> None:
    for share in sorted(found.keys() | wanted.keys(), key=repr):
        often, (way, rows) = found[share], share
        if often == wanted[share] == 1:
            continue
        (term, item), through = way.term, [name for name, _ in way.through]
        raise ConfigError(
            f"term {term!r}{f' of {item!r}' if item else ''} reaches {module!r} on rank {rank} "
            f"{often} times{f' through {through}' if through else ''} with the same share of its "
            f"rows ({rows}); each share must arrive exactly once"
        )


def check_order(programs: Mapping[int, Sequence[Meeting]]) -> None:
    """Follows all ranks through their exchanges, where a send waits until it is received."""
    left = {rank: list(reversed(meetings)) for rank, meetings in programs.items()}
    while any(left.values()):
        heads = {rank: stack[-1] for rank, stack in left.items() if stack}
        ready = [one for one in heads.values() if all(heads.get(r) == one for r in one.ranks)]
        if not ready:
            stuck = {rank: str(one) for rank, one in heads.items()}
            raise ConfigError(
                f"ranks would wait for each other for ever: {stuck}; all ranks must come to their "
                f"common exchanges in one order"
            )
        for one in dict.fromkeys(ready):
            for rank in one.ranks:
                left[rank].pop()
