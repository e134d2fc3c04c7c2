"""The plan of a topology: which arrows follow from who asks for what, and what is refused of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.layout import Span
from atoll.pools import Counted, Topology, plan_checks
from atoll.pools.arrows.base import Arrow, Meeting
from atoll.pools.arrows.edges import GradientEdge, ValueEdge
from atoll.pools.arrows.publication import Publication
from atoll.pools.arrows.reductions import Reduce, Returned
from atoll.pools.arrows.terms import Count, GlobalSum
from atoll.pools.gradcheck.loading import default_dtype
from atoll.pools.gradcheck.mutants.base import changed
from atoll.pools.gradcheck.mutants.edges import DoubledGradient
from atoll.pools.gradcheck.mutants.reductions import AveragedReduce
from atoll.pools.gradcheck.mutants.returns import to_all
from atoll.pools.gradcheck.mutants.terms import OnAll
from atoll.pools.placement import Placement
from atoll.pools.plan import Act, Plan, planned
from atoll.pools.routes import Route
from atoll.pools.trace import traced
from tests import pool_topologies


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def plan_of(top: Topology) -> Plan:
    return planned(top, traced(top))


# Which arrows there are


def test_chain_of_values_has_an_edge_to_each_consumer_and_back() -> None:
    plan = plan_of(pool_topologies.chain())

    assert list(plan.arrows) == [
        *("value low a -> b", "gradient low b -> a", "value low a -> c", "gradient low c -> a"),
        *("value mid b -> a", "gradient mid a -> b", "value mid b -> c", "gradient mid c -> b"),
        *("count last", "count near", "reduce a", "reduce b", "log"),
    ]
    order = [act.name for act in plan.sequence if act.kind in ("gradient", "back")]
    assert order == [
        *("gradient mid a -> b", "gradient mid c -> b", "mid"),
        *("gradient low b -> a", "gradient low c -> a", "low"),
    ]


def test_edge_sends_each_rank_its_own_rows() -> None:
    plan = plan_of(pool_topologies.chain())

    edge = plan.arrows["value low a -> b"]
    back = plan.arrows["gradient mid c -> b"]

    assert isinstance(edge, ValueEdge)
    assert edge.routes == (
        Route(0, 2, Span(0, 3), (None,)),
        Route(0, 3, Span(3, 6), (None,)),
        Route(1, 4, Span(6, 9), (None,)),
        Route(1, 5, Span(9, 12), (None,)),
    )
    assert isinstance(back, GradientEdge)
    assert [(one.source, one.to, one.rows.start) for one in back.routes] == [
        *((2, 6, 0), (3, 6, 3)),
        *((4, 6, 6), (5, 6, 9)),
    ]


def test_edge_carries_the_items_of_the_block_that_makes_them() -> None:
    plan = plan_of(pool_topologies.produced_by_item())
    edge = plan.arrows["value seen parts -> whole"]

    assert isinstance(edge, ValueEdge)
    to_first = [(one.source, one.rows, one.items) for one in edge.routes if one.to == 4]

    # Blocks of two ranks: 0 and 1 with p, 2 and 3 with q and r.
    assert to_first == [(0, Span(0, 3), ("p",)), (2, Span(0, 3), ("q", "r"))]


def test_borrowed_parameters_are_published_to_all_and_come_back_once() -> None:
    plan = plan_of(pool_topologies.borrowed_by_blocks())
    published, returned = plan.arrows["publish keep -> use"], plan.arrows["return use -> keep"]
    names = tuple(
        name
        for module in ("common", "special[s]", "special[t]", "special[u]")
        for name in (f"{module}.weight", f"{module}.bias")
    )

    assert isinstance(published, Publication)
    assert [(one.source, one.to) for one in published.sheets] == [(0, k) for k in (3, 4, 5, 6)]
    assert {one.tensors for one in published.sheets} == {names}
    assert isinstance(returned, Returned)
    assert (returned.source, returned.ranks) == (3, (3, 4, 5, 6))
    assert [(one.to, one.tensors) for one in returned.returns] == [(0, names)]


def test_parameters_of_blocks_come_back_to_the_first_replica_of_each() -> None:
    plan = plan_of(pool_topologies.asked_elsewhere().sized(own=(2, 3), other=3))
    returned, reduced = plan.arrows["return other -> own"], plan.arrows["reduce own"]

    assert isinstance(returned, Returned)
    assert [(one.to, one.modules) for one in returned.returns] == [
        (0, ("part[h.0/x]",)),
        (3, ("part[h.1/x]",)),
    ]
    assert isinstance(reduced, Reduce)
    assert dict(reduced.blocks) == {"own/0": (0, 1, 2), "own/1": (3, 4, 5)}
    assert reduced.tensors[4] == ("part[h.1/x].weight", "part[h.1/x].bias")


def test_global_sum_is_over_the_ranks_that_share_rows_out() -> None:
    plan = plan_of(pool_topologies.global_sums())
    whole, parted = plan.arrows["sum entropy"], plan.arrows["sum balance"]

    assert isinstance(whole, GlobalSum) and isinstance(parted, GlobalSum)
    assert dict(whole.groups) == {"one": (0, 1, 2, 3)}
    assert dict(parted.groups) == {"many/0": (4, 5), "many/1": (6, 7)}


def test_count_is_over_the_producing_pool_with_all_its_blocks() -> None:
    plan = plan_of(pool_topologies.global_sums())

    count = plan.arrows["count fit"]

    assert isinstance(count, Count)
    assert (count.pool, count.ranks, count.items) == (
        "many",
        (4, 5, 6, 7),
        ("k0", "k1", "k2", "k3"),
    )


def test_items_are_shared_out_evenly_and_in_order() -> None:
    top = pool_topologies.produced_by_item().sized(parts=(2, 1))

    placement = Placement(top)

    assert [placement.items(seat)["part"] for seat in placement.seats[:2]] == [("p",), ("q", "r")]
    assert placement.items(placement.seats[2])["part"] == ("p", "q", "r")


def test_value_may_be_called_like_an_arrow() -> None:
    top = Topology(rows=4)
    pool = top.pool("pool", ranks=2)
    top.rows(lambda index: index)

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(1, 1)

    @top.value(on=pool)
    def log(weights, rows):
        return weights(rows[:, None].double())

    @top.term(on=pool)
    def fit(log):
        return Counted(log.sum(), len(log), "rows")

    plan = plan_of(top)

    plan_checks.check(plan)
    assert [one.arrow for one in plan.meetings()] == ["count fit", "reduce pool", "log", "log"]


# Sizes that do not fit


def test_ragged_rows_are_refused_with_both_numbers() -> None:
    top = pool_topologies.chain()

    with pytest.raises(ConfigError, match=r"rows=12 do not divide over pool 'b' \(5 ranks\); each"):
        plan_of(top.sized(b=5))
    with pytest.raises(
        ConfigError,
        match=r"edge 'low' from 'a' \(2 ranks\) to 'b' \(3 ranks\): neither divides the other",
    ):
        plan_of(top.sized(b=3))
    with pytest.raises(
        ConfigError, match=r"edge 'mid' from 'b' \(1 ranks\) to 'a' \(2|edge 'low' from 'a' \(4"
    ):
        plan_of(top.sized(a=4, b=6))


def test_blocks_without_an_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="pool 'b' has blocks=2 and no axis that they share out"):
        plan_of(pool_topologies.chain().sized(b=(2, 2)))


def test_more_blocks_than_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="axis 'part' has 3 items for the 4 blocks of pool 'part"):
        plan_of(pool_topologies.produced_by_item().sized(parts=(4, 1)))


def test_pool_parameter_value_and_state_are_refused_unreached() -> None:
    def unreached(declare: Callable[[Topology], Any]) -> Plan:
        top = pool_topologies.chain()
        declare(top)
        return plan_of(top)

    def idle() -> nn.Module:
        return nn.Linear(1, 1)

    def unused(low):
        return low

    def unkept(draw):
        return draw.uniform(1)

    for declare, words in (
        (lambda top: top.pool("lazy", ranks=1), "pool 'lazy' computes no value and no term"),
        (lambda top: top.parameters(owner=top.pools["a"])(idle), "parameters 'idle' is asked for"),
        (lambda top: top.value(on=top.pools["a"])(unused), "value 'unused' is asked for by no"),
        (lambda top: top.state(on=top.pools["a"])(unkept), "state 'unkept' is asked for by no"),
    ):
        plan = unreached(declare)
        with pytest.raises(ConfigError, match=words):
            plan_checks.check(plan)


# Changed plans


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
def test_plan_of_every_shape_passes_at_all_of_its_sizes(shape: str) -> None:
    top = pool_topologies.SHAPES[shape]()
    trace = traced(top)

    for sized in (top, *(top.sized(**sizes) for sizes in top.sizes)):
        plan_checks.check(planned(sized, trace))


Change = Callable[[Plan], Plan]


def arrow(name: str, **fields: Callable[[Any], Any]) -> Change:
    """The plan with some fields of one arrow changed."""

    def change(plan: Plan) -> Plan:
        one = plan.arrows[name]
        return plan.replaced(replace(one, **{k: f(getattr(one, k)) for k, f in fields.items()}))

    return change


def kind(name: str, other: type[Arrow]) -> Change:
    return lambda plan: plan.replaced(changed(other, plan.arrows[name]))


def without(act: Act) -> Change:
    return lambda plan: replace(plan, sequence=tuple(a for a in plan.sequence if a != act))


def twice(act: Act) -> Change:
    def change(plan: Plan) -> Plan:
        at = plan.sequence.index(act)
        return replace(plan, sequence=(*plan.sequence[:at], act, *plan.sequence[at:]))

    return change


def later(act: Act) -> Change:
    """To the end, before the log."""

    def change(plan: Plan) -> Plan:
        rest = [one for one in plan.sequence if one != act]
        return replace(plan, sequence=(*rest[:-1], act, rest[-1]))

    return change


def lacking(name: str) -> Change:
    return lambda plan: replace(plan, arrows={k: v for k, v in plan.arrows.items() if k != name})


def first_gone(things: Any) -> Any:
    return things[1:]


def first_again(things: Any) -> Any:
    return (things[0], *things)


def block_cut(blocks: Any) -> Any:
    return {name: ranks[:1] for name, ranks in blocks.items()}


def tensors_cut(tensors: Any) -> Any:
    return {rank: names[1:] for rank, names in tensors.items()}


def sheets_cut(sheets: Any) -> Any:
    return tuple(replace(sheet, tensors=sheet.tensors[1:]) for sheet in sheets)


def sheets_of_second(sheets: Any) -> Any:
    return tuple(replace(sheet, source=1) for sheet in sheets)


def to_second(returns: Any) -> Any:
    return tuple(replace(one, to=one.to + 1) for one in returns)


def items_cut(routes: Any) -> Any:
    return tuple(replace(one, items=one.items[:1]) for one in routes)


def returned_to_all(plan: Plan) -> Plan:
    one = plan.arrows["return use -> keep"]
    assert isinstance(one, Returned)
    return plan.replaced(replace(one, returns=to_all(plan, one)))


BROKEN: dict[str, tuple[str, Change, str]] = {
    "gradient route dropped": (
        "chain",
        arrow("gradient low b -> a", routes=first_gone),
        r"term 'last' reaches 'wide' on rank 0 0 times through \['mid', 'low'\] with the same "
        r"share of its rows \(0\)",
    ),
    "gradient route doubled": (
        "chain",
        arrow("gradient mid c -> b", routes=first_again),
        r"term 'last' reaches 'wide' on rank 0 2 times through \['mid', 'low'\]",
    ),
    "gradient never sent": (
        "chain",
        without(Act("gradient", "gradient low c -> a")),
        r"term 'last' reaches 'wide' on rank 0 0 times through \['low'\]",
    ),
    "gradient of one item dropped": (
        "produced_by_item",
        arrow("gradient seen whole -> parts", routes=items_cut),
        r"term '\w+'( of 'r')? reaches 'piece\[r\]' on rank 2 0 times",
    ),
    "value route dropped": (
        "chain",
        arrow("value low a -> b", routes=first_gone),
        "value 'low' reaches rank 2 of pool 'b', for 'mid', 0 times in row 0; each of its rows",
    ),
    "value route doubled": (
        "chain",
        arrow("value mid b -> c", routes=first_again),
        "value 'mid' reaches rank 6 of pool 'c', for 'last', 2 times in row 0",
    ),
    "value of one item dropped": (
        "produced_by_item",
        arrow("value seen parts -> whole", routes=items_cut),
        "value 'seen' of 'r' reaches rank 4 of pool 'whole', for 'joint', 0 times in row 0",
    ),
    "value from a rank that has other rows": (
        "chain",
        arrow("value low a -> b", routes=lambda r: (replace(r[0], source=1), *r[1:])),
        "value 'low' reaches rank 2 of pool 'b', for 'mid', 0 times",
    ),
    "value never sent": (
        "chain",
        without(Act("send", "value low a -> c")),
        "value 'low' reaches rank 6 of pool 'c', for 'last', 0 times",
    ),
    "value sent too late": (
        "chain",
        later(Act("send", "value low a -> c")),
        "value 'low' reaches rank 6 of pool 'c', for 'last', 0 times",
    ),
    "averaged": ("chain", kind("reduce a", AveragedReduce), "'reduce a' is a AveragedReduce"),
    "another kind": (
        "chain",
        kind("gradient low b -> a", DoubledGradient),
        "'gradient low b -> a' is a DoubledGradient; a plan has .* never average",
    ),
    "reduced twice": (
        "chain",
        twice(Act("reduce", "reduce a")),
        "term 'last' reaches 'wide' on rank 0 2 times",
    ),
    "never reduced": (
        "chain",
        without(Act("reduce", "reduce b")),
        "term 'last' reaches 'deep' on rank 2 0 times",
    ),
    "reduced over too few": (
        "chain",
        arrow("reduce b", blocks=block_cut),
        "term 'last' reaches 'deep' on rank 2 0 times",
    ),
    "a tensor not reduced": (
        "chain",
        arrow("reduce b", tensors=tensors_cut),
        r"'reduce b' carries tensors \['deep.bias'\]; what its modules train is \['deep.weight'",
    ),
    "gradient not passed on": (
        "chain",
        without(Act("back", "mid")),
        r"term 'last' reaches 'wide' on rank 0 0 times through \['mid', 'low'\]",
    ),
    "term twice": (
        "chain",
        twice(Act("term", "near")),
        "term 'near' reaches 'deep' on rank 2 2 times|term 'near' reaches 'wide' on rank 0 2 times",
    ),
    "returned to the wrong replica": (
        "borrowed_by_blocks",
        arrow("return use -> keep", returns=to_second),
        r"'return use -> keep' sends gradients to ranks \[1\]; .* which are \[0, 3, 5\]",
    ),
    "returned to all": (
        "borrowed_by_blocks",
        returned_to_all,
        r"'return use -> keep' sends gradients to ranks \[0, 1, 2\]",
    ),
    "returned twice": (
        "borrowed_by_blocks",
        arrow("return use -> keep", returns=first_again),
        r"'return use -> keep' sends gradients to ranks \[0, 0\]",
    ),
    "returned by a stranger": (
        "borrowed_by_blocks",
        arrow("return use -> keep", source=lambda _: 1),
        r"'return use -> keep' is sent by rank 1, which is none of \[3, 4, 5, 6\]",
    ),
    "never returned": (
        "borrowed_by_blocks",
        without(Act("return", "return use -> keep")),
        "term 'fit' of 's' reaches 'common' on rank 0 0 times",
    ),
    "returned after the reduction": (
        "borrowed_by_blocks",
        later(Act("return", "return use -> keep")),
        "term 'fit' of 's' reaches 'common' on rank 1 0 times",
    ),
    "a tensor not returned": (
        "borrowed_by_blocks",
        arrow("return use -> keep", returns=sheets_cut),
        "'return use -> keep' carries tensors",
    ),
    "a tensor not published": (
        "borrowed_by_blocks",
        arrow("publish keep -> use", sheets=sheets_cut),
        r"parameter 'common.weight' is published to rank 3 .* by ranks \[\]",
    ),
    "published twice": (
        "borrowed_by_blocks",
        arrow("publish keep -> use", sheets=first_again),
        r"parameter 'common.weight' is published to rank 3 .* by ranks \[0, 0\]",
    ),
    "published by the wrong leader": (
        "borrowed_by_blocks",
        arrow("publish keep -> use", sheets=sheets_of_second),
        r"by ranks \[1\]; one must, the first replica",
    ),
    "never published": (
        "borrowed_by_blocks",
        without(Act("publish", "publish keep -> use")),
        r"parameter 'common.weight' is published to rank 3 .* by ranks \[\]",
    ),
    "once on all": ("borrowed_by_blocks", kind("once small", OnAll), "'once small' is a OnAll"),
    "once forgotten": (
        "borrowed_by_blocks",
        lacking("once small"),
        "term 'small' has once=True, and the plan has once=False",
    ),
    "count of another pool": (
        "borrowed_by_blocks",
        arrow("count fit", pool=lambda _: "keep"),
        r"term 'fit' is not counted over all ranks \[3, 4, 5, 6\] of pool 'use'",
    ),
    "count without a rank": (
        "borrowed_by_blocks",
        arrow("count fit", ranks=first_gone),
        "term 'fit' is not counted over all ranks",
    ),
    "count without an item": (
        "borrowed_by_blocks",
        arrow("count fit", items=first_gone),
        "term 'fit' is not counted over all ranks .* and all items",
    ),
    "no global sum": (
        "global_sums",
        lacking("sum entropy"),
        "term 'entropy' is a Through and has no global sum",
    ),
    "global sum of a block alone": (
        "global_sums",
        arrow("sum entropy", by_block=lambda _: True),
        "the global sum of term 'entropy' has by_block=True",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_refused_by_name(name: str) -> None:
    shape, change, words = BROKEN[name]
    plan = plan_of(pool_topologies.SHAPES[shape]())

    with pytest.raises(ConfigError, match=words):
        plan_checks.check(change(plan))


def test_contribution_of_two_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(pool_topologies.borrowed_by_blocks())
    once = plan.arrows["once small"]
    monkeypatch.setattr(type(once), "contributes", lambda *_: True)

    with pytest.raises(ConfigError, match=r"'once small' has ranks \[3, 4\] of block use/0 contr"):
        plan_checks.check(plan)


def test_arrow_of_another_plan_is_refused() -> None:
    plan = plan_of(pool_topologies.chain())
    other = plan_of(pool_topologies.borrowed_by_blocks())

    with pytest.raises(ConfigError, match=r"arrows \['count fit'\] are not in the plan; it has"):
        plan.replaced(other.arrows["count fit"])


def test_crossing_orders_are_refused_with_the_ranks_that_would_wait() -> None:
    one, two = Meeting("first", (0, 1)), Meeting("second", (1, 0), is_send=True)
    other = Meeting("apart", (2, 3))

    plan_checks.check_order({0: [one, two], 1: [one, two], 2: [other], 3: [other]})
    with pytest.raises(
        ConfigError,
        match=r"wait for each other for ever: \{0: 'first: \[0, 1\]', 1: 'second: 1 -> 0'\}",
    ):
        plan_checks.check_order({0: [one, two], 1: [two, one], 2: [other], 3: [other]})


def test_circle_of_sends_over_three_ranks_is_refused() -> None:
    ring = [Meeting("ring", (k, (k + 1) % 3), is_send=True) for k in range(3)]

    with pytest.raises(ConfigError, match="ranks would wait for each other"):
        plan_checks.check_order({k: [ring[k], ring[k - 1]] for k in range(3)})


def test_rank_that_does_not_come_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0: 'sum: \[0, 1\]'"):
        plan_checks.check_order({0: [Meeting("sum", (0, 1))], 1: []})


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
def test_coverage_has_every_row_of_a_term_once_for_each_call_and_way(shape: str) -> None:
    top = pool_topologies.SHAPES[shape]()
    plan = plan_of(top)

    coverage = plan_checks.check(plan)

    for seat in plan.placement.seats:
        for function in top.of_kind("parameters"):
            if function.pool == seat.pool and function.axis is None:
                found = coverage.expected(seat.rank, function.name)
                assert found == EXPECTED[shape][function.name]


EXPECTED: dict[str, dict[str, dict[str, int]]] = {
    # `last` asks for low, and for mid, which is made of low; `near` for wide itself, too.
    "chain": {"wide": {"last": 24, "near": 36}, "deep": {"last": 12, "near": 12}},
    "produced_by_item": {"mix": {"joint": 12, "apart": 36}},
    "borrowed_by_blocks": {"common": {"fit": 36, "own": 12}},
    "global_sums": {"weights": {"entropy": 12, "balance": 48, "fit": 48}},
    "asked_elsewhere": {"gate": {"fit": 24, "worst": 24}},
}
