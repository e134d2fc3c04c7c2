"""The three-pool example learns: what its gates say is worth something on rows it has not seen."""

import dataclasses

import pytest
import torch

from examples import train_three_pool
from examples.reconstruction import held_out_rows, reconstruct
from examples.three_pool import top
from examples.train_three_pool import OneProcess

STEPS = 50


@pytest.fixture(scope="module", autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def trained():
    losses, found = train_three_pool.train(OneProcess(top), steps=STEPS)
    return train_three_pool.ends(losses), found


@pytest.mark.parametrize("term", ["faith", "stoch", "minimal", "adversary"])
def test_loss_falls(trained, term):
    ends, _ = trained

    assert ends[term]["last"] < 0.8 * ends[term]["first"]


def test_gates_reconstruct_better_than_the_same_gates_of_other_components(trained):
    _, found = trained

    assert found.own < 0.5 * min(found.permuted)
    assert found.mean_gate > 0.1


def test_gates_that_nobody_trained_are_no_better_than_permuted_ones():
    """The control: the comparison is lost by what has learned nothing."""
    modules = train_three_pool.modules(OneProcess(top).weights())

    found = reconstruct(*modules, rows=held_out_rows(48))

    assert found.own > 0.9 * min(found.permuted)


def test_gates_close_when_importance_outweighs_the_rest():
    """The control of the mean gate: with all gates shut there is nothing to permute."""
    heavy = top.sized()
    minimal = dataclasses.replace(top.functions["minimal"], coeff=0.7)
    heavy.functions = {**top.functions, "minimal": minimal}

    _, found = train_three_pool.train(OneProcess(heavy), steps=STEPS)

    assert found.mean_gate < 0.01
    assert found.own == pytest.approx(min(found.permuted))
