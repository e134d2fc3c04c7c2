"""The canary: counts that cross with the gradients stop a run whose gradients are not whole."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from atoll.errors import ProtocolError
from atoll.pools import Counted, Topology, World
from atoll.pools.engine import Engine
from atoll.pools.gradcheck.loading import default_dtype
from atoll.pools.gradcheck.mutants import catalogue
from atoll.pools.plan import Plan
from atoll.pools.reference import Reference
from atoll.pools.threads import on_threads
from tests import pool_topologies

SHAPES = tuple(pool_topologies.SHAPES)
# Messages and reductions of gradients that are lost, doubled, averaged, or go to other ranks.
WORDS = (
    "dropped",
    "doubled",
    "SUM to AVG",
    "SUM twice",
    "SUM to none",
    "to all replicas",
    "on all",
)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def stopped(plan: Plan, right: World) -> list[str]:
    """What each rank of a changed plan says, with the right plan's counts on paper."""
    said: dict[int, str] = {}

    def work(engine: Engine) -> None:
        try:
            engine.step(0)
        except ProtocolError as error:
            said[engine.seat.rank] = str(error)

    on_threads(
        plan.placement,
        lambda rank, groups: work(
            Engine(plan, groups, right.weights, rank=rank, coverage=right.coverage, canary_every=1)
        ),
    )
    return [said.get(rank, "") for rank in range(plan.placement.size)]


def mutants(plan: Plan) -> list[str]:
    """Those of gradients on their way that are another program at this size."""
    found = []
    for mutant in catalogue.of(plan):
        arrow, _, word = mutant.name.partition(": ")
        kind = arrow.split()[0]
        if kind not in ("gradient", "return", "reduce", "once") or word not in WORDS:
            continue
        pool = arrow.split()[1] if kind != "return" else arrow.split()[-1]
        ranks = {"return": len(plan.placement.of(arrow.split()[1]))}.get(kind, 0)
        if kind in ("reduce", "once") or word == "to all replicas":
            name = plan.top.functions[pool].pool if kind == "once" else pool
            ranks = plan.top.pools[name].ranks
        if word in ("dropped", "doubled") or ranks > 1:
            found.append(mutant.name)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_canary_stops_every_rank_at_the_step_and_names_the_term(shape: str) -> None:
    world = World(pool_topologies.SHAPES[shape]())
    names = mutants(world.plan)
    terms = {term.name for term in world.plan.top.of_kind("term")}

    for name in names:
        said = stopped(catalogue.named(world.plan, name), world)

        assert all(one.startswith("step 0: gradients of [") for one in said), name
        assert len({one.split("]")[0] for one in said}) == 1, name
        assert any(f"'{term}'" in said[0] for term in terms), name
        assert any("rows of" in one for one in said), name
    assert len(names) >= 3


def test_canary_names_the_one_term_whose_gradients_were_lost() -> None:
    top = pool_topologies.asked_elsewhere()
    world = World(top)

    said = stopped(catalogue.named(world.plan, "gradient gates own -> other: dropped"), world)

    assert all("gradients of ['fit']" in one for one in said)
    # Rank 2 is the first of pool `other`; its gate should be over the rows of both sites.
    assert "rank 2 of pool 'other' has 0 rows of 'fit' at 'gate', not 24" in said[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["whole", "bf16"])
def test_canary_lets_a_right_run_go_on_and_changes_no_gradient(
    shape: str, wire: torch.dtype | None
) -> None:
    world = World(pool_topologies.SHAPES[shape]().with_wire(wire))

    def work(engine: Engine) -> list[torch.Tensor]:
        for step in range(3):
            engine.step(step)
        return [one.grad for one in engine.owned().values() if one.grad is not None]

    watched, plain = world.on_threads(work, canary_every=1), world.on_threads(work, canary_every=0)

    for one, other in zip(watched, plain, strict=True):
        assert len(one) == len(other)
        # Equal but for the order in which a sum's ranks are added: it goes by place in the message.
        for found, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_canary_crosses_each_kth_step_and_tells_the_norm_of_each_term(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(pool_topologies.global_sums())
    one = Reference(world.plan.top, world.weights)
    coeffs = {term.name: term.coeff for term in world.plan.top.of_kind("term")}
    wanted = {
        name: float(nn.utils.get_total_norm(list(one.grads(coeffs[name] * term.loss()).values())))
        for name, term in one.step(0).items()
    }

    with caplog.at_level(logging.INFO, "atoll.pools.engine"):
        told = world.on_threads(
            lambda engine: [engine.step(step).norms for step in range(4)], canary_every=3
        )

    for norms in told:
        assert [bool(one) for one in norms] == [True, False, False, True]
        assert {k: norms[0][k] for k in wanted} == pytest.approx(wanted, rel=1e-13)
        assert norms[0].keys() == {"all", *wanted}
    logged = [record for record in caplog.records if record.message == "term norms"]
    assert [record.__dict__["step"] for record in logged] == [0, 3]
    assert logged[0].__dict__["norms"]["fit"] == pytest.approx(wanted["fit"], abs=1e-6)


def many_items(count: int) -> Topology:
    """A value that more items ask for than bf16 has whole numbers in a row."""
    top = Topology(rows=2, wire=torch.bfloat16)
    one, other = top.pool("one", ranks=1), top.pool("other", ranks=2)
    top.axis("item", [f"i{k}" for k in range(count)], over=other)

    @top.rows
    def batch(draw):
        return draw.normal(2)

    @top.parameters(owner=one)
    def weights():
        return nn.Linear(2, 1)

    @top.value(on=one)
    def code(weights, rows):
        return weights(rows)

    @top.term(on=other)
    def fit(code, item):
        return Counted(code.square().sum(), len(code), "rows")

    return top


def test_canarys_counts_are_not_rounded_by_the_wire() -> None:
    world = World(many_items(259))

    told = world.on_threads(lambda engine: engine.step(0).counts, canary_every=1)

    assert float(torch.tensor(259.0).bfloat16()) == 260.0
    assert told[0] == {"fit": 2 * 259}


def test_terms_may_be_called_like_fields_of_a_log_record() -> None:
    top = Topology(rows=2)
    pool = top.pool("pool", ranks=2)

    @top.rows
    def batch(draw):
        return draw.normal(2)

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(2, 1)

    @top.term(on=pool)
    def name(weights, rows):
        return Counted(weights(rows).square().sum(), len(rows), "rows")

    told = World(top).on_threads(lambda engine: engine.step(0).norms, canary_every=1)

    assert told[0].keys() == {"all", "name"}
