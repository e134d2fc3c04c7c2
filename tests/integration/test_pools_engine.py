"""Ranks of small topologies on threads against one process: gradients, losses, state, clipping."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.clock import SystemClock
from atoll.collectives.local import LocalGroup, LocalMember
from atoll.collectives.runners import Inline
from atoll.errors import ConfigError, EmptySum
from atoll.pools import Counted, Through, Topology, World, clip_grad_norm, grad_norm
from atoll.pools.arrows.edges import Edge
from atoll.pools.arrows.terms import Count
from atoll.pools.engine import Engine, Told
from atoll.pools.gradcheck.loading import default_dtype
from atoll.pools.reference import Reference
from tests import pool_topologies

Grads = dict[str, Tensor]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def pairs(draw):
    return draw.normal(2)


def sizes(top: Topology) -> list[Topology]:
    return [top, *(top.sized(**one) for one in top.sizes)]


def on_ranks(world: World, steps: int = 2, **options: Any) -> list[list[tuple[Grads, Told]]]:
    """Each rank's gradients of its own parameters and what it was told, step by step, with SGD."""

    def work(engine: Engine) -> list[tuple[Grads, Told]]:
        own = engine.owned()
        found: list[tuple[Grads, Told]] = []
        for step in range(steps):
            told = engine.step(step)
            grads = {name: one.grad.clone() for name, one in own.items() if one.grad is not None}
            found.append((grads, told))
            stepped(own.values())
        return found

    return world.on_threads(work, **options)


def stepped(parameters: Any) -> None:
    with torch.no_grad():
        for one in parameters:
            one -= 0.1 * one.grad


def in_one_process(world: World, steps: int = 2) -> list[tuple[Grads, dict[str, float]]]:
    """The same by plain autograd."""
    top = world.plan.top
    one = Reference(top, world.weights)
    coeffs = {term.name: term.coeff for term in top.of_kind("term")}
    found: list[tuple[Grads, dict[str, float]]] = []
    for step in range(steps):
        losses = {name: coeffs[name] * term.loss() for name, term in one.step(step).items()}
        trained = one.trained()
        grads = one.grads(torch.stack(list(losses.values())).sum())
        for name, parameter in trained.items():
            parameter.grad = grads[name].clone()
        stepped(trained.values())
        found.append((grads, {name: float(loss.detach()) for name, loss in losses.items()}))
    return found


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
@pytest.mark.parametrize("at", [0, 1])
def test_ranks_have_the_gradients_and_losses_of_one_process(shape: str, at: int) -> None:
    world = World(sizes(pool_topologies.SHAPES[shape]())[at])

    ranks, right = on_ranks(world), in_one_process(world)

    reached = {name for rank in ranks for name in rank[0][0]}
    assert reached == set(right[0][0])
    for rank in ranks:
        for (grads, told), (wanted, losses) in zip(rank, right, strict=True):
            assert max((error(grads[k], wanted[k]) for k in grads), default=0.0) < 1e-13
            assert told.losses == pytest.approx(losses, rel=1e-13)


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
def test_replicas_and_all_told_are_equal_to_the_bit(shape: str) -> None:
    ranks = on_ranks(World(pool_topologies.SHAPES[shape]()))

    for step in (0, 1):
        first: dict[str, Tensor] = {}
        for rank in ranks:
            grads, told = rank[step]
            assert told == ranks[0][step][1]
            for name, grad in grads.items():
                assert torch.equal(first.setdefault(name, grad), grad)


def test_float32_agrees_with_a_float32_process() -> None:
    with default_dtype(torch.float32):
        world = World(pool_topologies.asked_elsewhere())
        ranks, right = on_ranks(world, steps=1), in_one_process(world, steps=1)

    for rank in ranks:
        grads, _ = rank[0]
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        assert max(error(grads[name], right[0][0][name]) for name in grads) < 4e-7


def test_frozen_parameters_and_buffers_stay_and_tied_ones_are_one() -> None:
    world = World(pool_topologies.asked_elsewhere())

    ranks = on_ranks(world, steps=1)

    owned = {name for rank in ranks for name in rank[0][0]}
    assert "gate.last.bias" in world.weights and "gate.last.bias" not in owned
    assert "gate.scale" in world.weights and "gate.scale" not in owned
    assert "gate.first.weight" in owned and "gate.again.weight" not in owned


def frozen() -> Topology:
    """A pool lends a module of which nothing is trained."""
    top = Topology(rows=12)
    lender, pool = top.pool("lender", ranks=2), top.pool("pool", ranks=3)

    @top.rows
    def batch(index, draw):
        return draw.normal(3)

    @top.parameters(owner=lender)
    def still():
        return nn.Linear(3, 2).requires_grad_(False)

    @top.parameters(owner=pool)
    def moved():
        return nn.Linear(2, 2)

    @top.term(on=pool)
    def fit(still, moved, rows):
        return Counted(moved(still(rows)).square().sum(), len(rows), "rows")

    @top.term(on=lender)
    def shown(still, rows):
        return Counted(still(rows).square().sum(), len(rows), "rows")

    return top


def test_module_that_is_frozen_as_a_whole_is_lent_and_gets_nothing_back() -> None:
    world = World(frozen())

    ranks, right = on_ranks(world, canary_every=1), in_one_process(world)

    assert not any("->" in name for name in world.plan.arrows)
    assert error(ranks[4][0][0]["moved.weight"], right[0][0]["moved.weight"]) < 1e-13
    assert ranks[0][1][1].losses == pytest.approx(right[1][1], rel=1e-13)


def test_one_rank_is_a_world() -> None:
    top = Topology(rows=4)
    pool = top.pool("pool", ranks=1)
    top.rows(pairs)

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(2, 1)

    @top.term(on=pool)
    def fit(weights, rows):
        return Counted(weights(rows).square().sum(), len(rows), "rows")

    world = World(top)

    ((one,),) = on_ranks(world, steps=1, canary_every=1)

    assert error(one[0]["weights.weight"], in_one_process(world)[0][0]["weights.weight"]) < 1e-14


# Counts


def counted(counts: list[int]) -> Topology:
    """One pool of three ranks; the term counts what is given by row."""
    top = Topology(rows=len(counts))
    pool = top.pool("pool", ranks=3)

    @top.rows
    def batch(index, draw):
        return draw.normal(2), torch.tensor(counts).repeat(8)[index]

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(2, 1)

    @top.term(on=pool, coeff=2.0)
    def fit(weights, rows):
        x, n = rows
        return Counted((weights(x).square().sum(1) * n).sum(), int(n.sum()), "tokens")

    return top


def test_rank_that_counts_nothing_is_right() -> None:
    world = World(counted([3, 1, 0, 0, 2, 5]))

    ranks, right = on_ranks(world), in_one_process(world)

    for rank in ranks:
        for (grads, told), (wanted, _) in zip(rank, right, strict=True):
            assert max(error(grads[name], wanted[name]) for name in grads) < 1e-13
            assert told.counts == {"fit": 11}


def test_step_that_counts_nothing_is_refused_and_leaves_gradients_alone() -> None:
    counts = [1, 2, 3]
    world = World(counted(counts))
    left: dict[int, Any] = {}

    def work(engine: Engine) -> None:
        engine.step(0)
        left[engine.seat.rank] = engine.owned()["weights.weight"].grad
        counts[:] = [0, 0, 0]
        engine.desk.groups["pool"].barrier(engine.next_key()).wait()
        engine.step(1)

    with pytest.raises(EmptySum, match="term 'fit' counted nothing in this step"):
        world.on_threads(work)

    assert all(torch.isfinite(grad).all() for grad in left.values())


def test_term_of_another_kind_than_planned_is_refused() -> None:
    kind = {"now": "Counted"}
    top = Topology(rows=4)
    pool = top.pool("pool", ranks=2)
    top.rows(pairs)

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(2, 1)

    @top.term(on=pool)
    def fit(weights, rows):
        total = weights(rows).square().sum()
        if kind["now"] == "Counted":
            return Counted(total, 1, "rows")
        return Through(total, 1, "rows", lambda s, n: s / n)

    world = World(top)
    kind["now"] = "Through"

    with pytest.raises(ConfigError, match=r"term 'fit' returned \['Through'\] here and Counted"):
        on_ranks(world)


# No number changes with a pool's size


@pytest.mark.parametrize("shape", ["chain", "global_sums"])
@pytest.mark.parametrize("grows", [0, 1])
def test_scales_and_gradient_messages_are_the_same_at_1_4_and_16_ranks(
    shape: str, grows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = pool_topologies.SHAPES[shape]().with_rows(16)
    pools = list(top.pools)
    found = []

    for ranks in (1, 4, 16):
        scales: dict[str, set[float]] = {}
        rows: dict[tuple[str, Any, int], Tensor] = {}
        _watch(monkeypatch, scales, rows)
        on_ranks(World(top.sized(**{pools[grows]: ranks, pools[1 - grows]: 4})), 1, canary_every=0)
        monkeypatch.undo()
        found.append((scales, rows))

    first_scales, first_rows = found[0]
    assert first_scales
    assert first_rows
    for scales, rows in found[1:]:
        assert scales == first_scales
        assert rows.keys() == first_rows.keys()
        for key, row in rows.items():
            torch.testing.assert_close(row, first_rows[key], rtol=1e-12, atol=1e-16)


def _watch(
    monkeypatch: pytest.MonkeyPatch,
    scales: dict[str, set[float]],
    rows: dict[tuple[str, Any, int], Tensor],
) -> None:
    """Writes down every scale, and every row that a gradient message carries."""
    scale, run = Count.scale, Edge.sent
    lock = threading.Lock()

    def scaled(self: Count, desk: Any, coeffs: Tensor, term: str, counts: Any) -> Tensor:
        value = scale(self, desk, coeffs, term, counts)
        with lock:
            scales.setdefault(term, set()).update(value.tolist())
        return value

    def sent(self: Edge, desk: Any, parts: Any, to: int) -> None:
        if self.name.startswith("gradient"):
            (route,) = [r for r in self.routes if (r.to, r.source) == (desk.seat.rank, to)]
            with lock:
                for item, part in zip(route.items, parts, strict=True):
                    for place in range(part.shape[1]):
                        key = self.name, item, route.rows.start + place
                        rows[key] = rows.get(key, 0) + part[0, place].clone()
        run(self, desk, parts, to)

    monkeypatch.setattr(Count, "scale", scaled)
    monkeypatch.setattr(Edge, "sent", sent)


# Clipping


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
@pytest.mark.parametrize("part", [0.3, 3.0], ids=["clipped", "whole"])
def test_clipping_equals_torchs_in_one_process(shape: str, part: float) -> None:
    world = World(pool_topologies.SHAPES[shape]())
    one = Reference(world.plan.top, world.weights)
    coeffs = {term.name: term.coeff for term in world.plan.top.of_kind("term")}
    losses = [coeffs[name] * term.loss() for name, term in one.step(0).items()]
    torch.stack(losses).sum().backward()
    parameters = one.trained()
    norm = float(
        nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
    )
    nn.utils.clip_grad_norm_(parameters.values(), part * norm)

    def work(engine: Engine) -> tuple[float, float, Grads]:
        engine.step(0)
        before = clip_grad_norm(engine, part * norm)
        after = grad_norm(engine)  # a second exchange of the same step
        return (
            before,
            after,
            {k: p.grad.clone() for k, p in engine.owned().items() if p.grad is not None},
        )

    for before, after, grads in world.on_threads(work):
        assert before == pytest.approx(norm, rel=1e-13)
        assert after == pytest.approx(min(1.0, part) * norm, rel=1e-5)
        for name, grad in grads.items():
            wanted = parameters[name].grad
            assert wanted is not None
            assert error(grad, wanted) < 1e-13


def test_clipping_spreads_nan_as_torch_does() -> None:
    world = World(pool_topologies.chain())

    def work(engine: Engine) -> bool:
        engine.step(0)
        own = [one for one in engine.owned().values() if one.grad is not None]
        if engine.seat.pool == "a":
            own[0].grad[0] = torch.nan  # type: ignore[index] # just asked
        clip_grad_norm(engine, 1.0)
        return all(bool(one.grad.isnan().all()) for one in own if one.grad is not None)

    assert all(world.on_threads(work))


# Steps, groups and errors


def test_steps_go_up_and_may_leave_gaps() -> None:
    world = World(counted([1, 2, 3]))

    def work(engine: Engine) -> None:
        engine.step(3)
        engine.step(7)
        engine.step(7)

    with pytest.raises(
        ConfigError, match="step=7 follows step 7; steps are numbered from 0 upwards"
    ):
        world.on_threads(work)


def test_world_refuses_a_group_of_another_size() -> None:
    world = World(counted([1, 2, 3]))
    group = LocalGroup(2, clock=SystemClock()).rank(0, Inline())

    with pytest.raises(ConfigError, match=r"the group has 2 ranks and .* \{'pool': 3\} take 3"):
        world.engine(group)


def test_world_makes_an_engine_of_each_rank_of_a_group() -> None:
    world = World(counted([1, 2, 3]))
    group = LocalGroup(3, clock=SystemClock())
    members = [group.rank(rank, Inline()) for rank in range(3)]
    engines = [world.engine(member) for member in members]

    assert [engine.seat.rank for engine in engines] == [0, 1, 2]
    assert engines[0].canary_every == 50


def broken(top: Topology, where: Callable[[str], bool]) -> None:
    """Makes the term `last` raise on a rank's thread."""
    function = top.functions["last"]

    def last(low, mid, rows):
        if where(threading.current_thread().name):
            raise ZeroDivisionError("of the user's own")
        return function.call(low, mid, rows)

    top.functions["last"] = type(function)(
        function.kind, function.name, last, function.asks, function.pool, function.axis, 2.0, False
    )


def test_error_on_one_rank_reaches_all_by_name_and_leaves_no_thread() -> None:
    top = pool_topologies.chain().sized(c=6, a=3, b=1)
    broken(top, lambda thread: thread == "rank-6")
    world = World(top)
    told: dict[int, str] = {}

    def work(engine: Engine) -> None:
        try:
            engine.step(0)
        except Exception as error:
            told[engine.seat.rank] = str(error)
            raise

    with pytest.raises(ConfigError, match="term 'last' raised while it was called: ZeroDivisionEr"):
        world.on_threads(work)

    assert told.keys() == set(range(10))
    assert all("term 'last' raised" in one for one in told.values())
    assert not [one for one in threading.enumerate() if one.name.startswith("rank-")]


def test_module_of_the_file_is_not_shared_by_ranks() -> None:
    shared = nn.Linear(2, 1)
    top = counted([1, 2, 3])
    function = top.functions["weights"]

    def weights():
        return shared

    top.functions["weights"] = type(function)("parameters", "weights", weights, (), "pool")
    world = World(top)

    ranks, right = on_ranks(world), in_one_process(world)

    assert error(ranks[2][1][0]["weights.weight"], right[1][0]["weights.weight"]) < 1e-13
    assert shared.weight.grad is None


def test_wire_rounds_each_message_once() -> None:
    top = pool_topologies.chain()
    plain, rounded = World(top), World(top.with_wire(torch.bfloat16))

    exact, near = on_ranks(plain, steps=1), on_ranks(rounded, steps=1)

    errors = [
        error(near[rank][0][0][name], grad)
        for rank in range(6)
        for name, grad in exact[rank][0][0].items()
    ]
    # bf16 keeps 8 bits: a value is off by 2^-9 of itself at most, and a few cross.
    assert 1e-5 < max(errors) < 16 * 2**-9


def test_wire_is_the_dtype_of_what_edges_send(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalMember.send
    sent: list[torch.dtype] = []

    def watched(self: LocalMember, key: Any, values: Tensor, *, to: int) -> Any:
        sent.append(values.dtype)
        return send(self, key, values, to=to)

    monkeypatch.setattr(LocalMember, "send", watched)

    on_ranks(World(pool_topologies.chain().with_wire(torch.bfloat16)), steps=1, canary_every=0)

    assert set(sent) == {torch.bfloat16}


def test_rank_receives_the_items_of_its_block_alone() -> None:
    world = World(pool_topologies.asked_elsewhere())

    def work(engine: Engine) -> list[Any]:
        engine.step(0)
        return list(engine.desk.leaves["gates"])

    assert world.on_threads(work)[:3] == [["h.0/x"], ["h.1/x"], ["h.0/x", "h.1/x"]]
