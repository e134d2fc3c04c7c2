"""Pairs of gradients: ratio, error, cosine, and what counts as right, unobserved or a leak."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools.gradcheck import compare as comparing
from atoll.pools.gradcheck.compare import Pair
from atoll.pools.gradcheck.outcome import ALL, Outcome

A = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
B = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)


def outcome(grads: Mapping[str, Mapping[str, Tensor]], **other) -> Outcome:
    about = {"losses": {}, "counts": {}, "clip_norm": None} | other
    return Outcome(grads, **about)


def pair(wanted: Tensor, found: Tensor, *, tolerance: float = 1e-12) -> Pair:
    """Of one tensor in lane ALL."""
    (one,) = comparing.compare(
        outcome({ALL: {"w": wanted}}), outcome({ALL: {"w": found}}), tolerance=tolerance
    )
    return one


def test_equal_gradients_are_right():
    assert pair(A, A.clone()) == Pair(ALL, "w", 1.0, 0.0, 1.0, "right", 0.0)


def test_scaled_gradient_has_its_scale_as_ratio_and_no_residual():
    found = pair(A, 0.25 * A)

    assert (found.ratio, found.error, found.cosine, found.state) == (0.25, 0.75, 1.0, "wrong")
    assert found.residual == 0.0


def test_gradient_beside_the_right_one_has_an_error_and_a_residual():
    """A = (3, 0, 4), B across it of length 2: ratio 1, error and residual 2/5."""
    found = pair(A, A + B)

    assert found.ratio == pytest.approx(1.0)
    assert found.error == pytest.approx(0.4)
    assert found.residual == pytest.approx(0.4)
    assert found.cosine == pytest.approx(5 / math.sqrt(29))
    assert found.state == "wrong"


@pytest.mark.parametrize(("off", "state"), [(0.9e-12, "right"), (1.1e-12, "wrong")])
def test_tolerance_is_what_it_says(off, state):
    assert pair(A, A * (1 + off)).state == state
    assert pair(A, A + B / 2 * 5 * off).state == state


def test_tiny_gradients_are_compared_though_their_squares_vanish():
    found = pair(A * 1e-200, A * 0.5e-200)

    assert (found.ratio, found.state) == (0.5, "wrong")


def test_path_that_is_dead_in_the_ranks_is_ratio_0_and_not_unobserved():
    zeros = outcome({ALL: {"w": torch.zeros(3)}})
    absent = outcome({ALL: {}})
    wanted = outcome({ALL: {"w": A}})

    for found in (zeros, absent):
        (one,) = comparing.compare(wanted, found, tolerance=1e-12)
        assert one == Pair(ALL, "w", 0.0, 1.0, 0.0, "wrong", 0.0)


@pytest.mark.parametrize(("part", "state"), [(0.5e-8, "unobserved"), (2e-8, "right")])
def test_gradient_far_below_the_tensors_whole_one_is_unobserved(part, state):
    grads = {ALL: {"w": A}, "small": {"w": A * part}}

    found = comparing.compare(outcome(grads), outcome(grads), tolerance=1e-12)

    assert [one.state for one in found] == ["right", state]


def test_connected_gradient_of_0_is_unobserved():
    found = pair(torch.zeros(3), torch.zeros(3))

    assert (found.state, found.is_wrong) == ("unobserved", True)


def test_pair_that_is_not_connected_must_be_exactly_0():
    wanted = outcome({ALL: {"w": A}, "t": {}})
    zero = outcome({ALL: {"w": A}, "t": {"w": torch.zeros(3)}})
    tiny = outcome({ALL: {"w": A}, "t": {"w": 1e-300 * B}})

    right = comparing.compare(wanted, zero, tolerance=1e-12)
    leaks = comparing.compare(wanted, tiny, tolerance=1e-12)

    assert [one.state for one in right] == ["right", "apart"]
    assert not any(one.is_wrong for one in right)
    assert [one.state for one in leaks] == ["right", "leak"]
    assert leaks[1].is_wrong


def test_tensor_that_only_the_ranks_have_is_a_leak():
    found = comparing.compare(
        outcome({ALL: {"w": A}}), outcome({ALL: {"w": A, "v": B}}), tolerance=1e-12
    )

    assert [(one.tensor, one.state) for one in found] == [("w", "right"), ("v", "leak")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_is_wrong(bad):
    found = pair(A, torch.tensor([3.0, bad, 4.0]))

    assert (found.state, found.ratio, found.error) == ("wrong", None, math.inf)


def test_reference_that_is_not_finite_is_refused():
    with pytest.raises(ConfigError, match="'w' in lane 'all' of the reference has norm"):
        pair(torch.tensor([math.nan, 1.0, 1.0]), A)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ConfigError, match=r"\(2,\) in the ranks and \(3,\) in the reference"):
        pair(A, A[:2])


def test_lane_on_one_side_only_is_refused():
    with pytest.raises(ConfigError, match=r"lanes \['t'\]"):
        comparing.compare(outcome({ALL: {}, "t": {}}), outcome({ALL: {}}), tolerance=1e-12)


def test_logged_numbers_are_compared_as_far_as_they_were_logged():
    wanted = outcome({}, losses={"a": 2.0, "b": 3.0}, counts={"a": 35}, clip_norm=4.0)
    found = outcome({}, losses={"a": 2.0 + 1e-15}, counts={"a": 34}, clip_norm=8.0)

    told = comparing.compare_logged(wanted, found, tolerance=1e-12)

    assert [(one.kind, one.term, one.is_wrong) for one in told] == [
        ("loss", "a", False),
        ("count", "a", True),
        ("clip norm", "", True),
    ]
    assert told[2].ratio == 2.0


def test_count_has_no_tolerance():
    wanted, found = outcome({}, counts={"a": 10**15}), outcome({}, counts={"a": 10**15 + 1})

    (one,) = comparing.compare_logged(wanted, found, tolerance=1e-12)

    assert one.is_wrong


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logged_number_that_is_not_finite_is_wrong_and_has_no_ratio(value):
    wanted, found = outcome({}, losses={"a": 1.0}), outcome({}, losses={"a": value})

    (one,) = comparing.compare_logged(wanted, found, tolerance=1e-12)

    assert one.is_wrong
    assert one.ratio is None


def test_number_of_an_unknown_term_is_refused():
    with pytest.raises(ConfigError, match=r"loss of \['zz'\]"):
        comparing.compare_logged(
            outcome({}, losses={"a": 1.0}), outcome({}, losses={"zz": 1.0}), tolerance=1e-12
        )
