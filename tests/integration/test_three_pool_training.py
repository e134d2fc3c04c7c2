"""The three-pool example trains on ranks as in one process, and what its gates say is worth it."""

import dataclasses

import pytest
import torch

from atoll.errors import ProtocolError
from atoll.pools import World
from atoll.pools.gradcheck.mutants import catalogue
from examples import train_three_pool
from examples.reconstruction import held_out_rows, reconstruct
from examples.three_pool import top
from examples.train_three_pool import in_one, on_rank, on_threads, silent

STEPS = 50
FEW = 4
SIZES = [
    pytest.param({}, id="(4, 2x2, 2)"),
    pytest.param({"ci": 2, "layers": (2, 4), "ppgd": 6}, id="(2, 2x4, 6)"),
]


@pytest.fixture(scope="module", autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def reference():
    return in_one(top, steps=STEPS)


@pytest.fixture(scope="module", params=SIZES)
def trained(request):
    return on_threads(top.sized(**request.param), steps=STEPS, canary_every=25)


def found(weights):
    return reconstruct(*train_three_pool.modules(weights), rows=held_out_rows(48))


def apart(losses, others):
    """The largest relative difference of any term in any step."""
    return max(
        abs(one[term] - other[term]) / abs(one[term])
        for one, other in zip(losses, others, strict=True)
        for term in one
    )


def test_losses_of_every_step_are_those_of_one_process(trained, reference):
    assert len(trained.losses) == STEPS
    assert apart(reference.losses, trained.losses) < 1e-9


def test_weights_are_those_of_one_process(trained, reference):
    errors = {
        name: float((trained.weights[name] - wanted).norm() / wanted.norm())
        for name, wanted in reference.weights.items()
    }

    assert trained.weights.keys() == reference.weights.keys()
    assert max(errors.values()) < 1e-9


@pytest.mark.parametrize("term", ["faith", "stoch", "minimal", "adversary"])
def test_loss_falls(trained, term):
    ends = train_three_pool.ends(trained.losses)

    assert ends[term]["last"] < 0.8 * ends[term]["first"]


def test_gates_reconstruct_better_than_the_same_gates_of_other_components(trained):
    held_out = found(trained.weights)

    assert held_out.own < 0.5 * min(held_out.permuted)
    assert held_out.mean_gate > 0.1


def mutated(name, *, canary_every):
    """The losses of some steps with one arrow of the plan replaced."""
    world = World(top)
    world.plan = catalogue.named(world.plan, name)
    ranks = world.on_threads(
        lambda engine: on_rank(world, engine, steps=FEW, tell=silent), canary_every=canary_every
    )
    return ranks[0].losses


@pytest.mark.parametrize(
    "mutant",
    ["reduce ci: SUM to AVG", "return ppgd -> layers: to all replicas", "count stoch: local"],
)
def test_one_wrong_arrow_shows_in_the_losses(mutant, reference):
    """The control: AdamW hides a factor from the eye, and not from this comparison."""
    assert apart(reference.losses[:FEW], mutated(mutant, canary_every=0)) > 1e-6


def test_canary_stops_a_training_whose_gradients_are_not_whole():
    with pytest.raises(ProtocolError, match=r"gradients of \['adversary'\] are not over all"):
        mutated("return ppgd -> layers: dropped", canary_every=25)


def test_gates_that_nobody_trained_are_no_better_than_permuted_ones():
    """The control: the comparison is lost by what has learned nothing."""
    held_out = found(in_one(top, steps=0).weights)

    assert held_out.own > 0.9 * min(held_out.permuted)


def test_gates_close_when_importance_outweighs_the_rest():
    """The control of the mean gate: with all gates shut there is nothing to permute."""
    heavy = top.sized()
    minimal = dataclasses.replace(top.functions["minimal"], coeff=0.7)
    heavy.functions = {**top.functions, "minimal": minimal}

    held_out = found(in_one(heavy, steps=STEPS).weights)

    assert held_out.mean_gate < 0.01
    assert held_out.own == pytest.approx(min(held_out.permuted))
