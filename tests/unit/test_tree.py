"""Sums whose bits matter: one shape of the tree, in torch and in a loop."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from atoll.codecs import tree


def rows(width: int) -> torch.Tensor:
    """Numbers so different in size that every other order of adding shows."""
    rng = np.random.default_rng(width)
    return torch.from_numpy(np.ldexp(rng.standard_normal((50, width)), rng.integers(0, 60, width)))


def halved(terms: list[float]) -> float:
    """The definition, in Python's floats: the upper half is added to the lower."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[half + i] for i in range(half)]
    return terms[0]


def paired(terms: list[float]) -> float:
    """Another tree: neighbours are added."""
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


@pytest.mark.parametrize("width", [1, 2, 64, 256])
def test_sum_is_that_of_the_tree(width):
    terms = rows(width)

    assert tree.total(terms).tolist() == [halved(row) for row in terms.tolist()]


@pytest.mark.parametrize("width", [1, 2, 64, 256])
def test_loop_adds_in_the_same_order(width):
    terms = rows(width)

    found = [tree.halve(row.copy()) for row in terms.numpy()]

    assert found == tree.total(terms).tolist()


def test_other_orders_are_other_sums():
    """The control: these numbers tell trees apart."""
    terms = rows(64)

    found = tree.total(terms).tolist()

    assert found != [paired(row) for row in terms.tolist()]
    assert found != [list(accumulate(row))[-1] for row in terms.tolist()]
    assert found != terms.sum(dim=1).tolist()


def test_terms_stay_and_zeros_change_nothing():
    terms = rows(64)
    before = terms.clone()
    filled = torch.cat([terms, torch.zeros(50, 64)], dim=1)

    assert torch.equal(tree.total(filled), tree.total(terms))
    assert torch.equal(terms, before)
