"""A mutant is killed by the table that it stated first, and by no other."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from atoll.pools import plan_checks
from atoll.pools.gradcheck import kills, sizes, trial
from atoll.pools.gradcheck.evenness import evenness
from atoll.pools.gradcheck.loading import default_dtype
from atoll.pools.gradcheck.mutants.base import (
    Differs,
    Facts,
    Gradient,
    Mutant,
    Prediction,
    Ratio,
    Structural,
)
from atoll.pools.gradcheck.outcome import Outcome
from atoll.pools.gradcheck.report import Kill
from atoll.pools.made import initial
from atoll.pools.plan import planned
from atoll.pools.trace import traced
from tests import pool_topologies

PAIR = ("near", "deep.weight")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


@pytest.fixture(name="judge")
def judging() -> Callable[..., Kill]:
    """Judges a mutant that predicts something of PAIR, and found this factor there."""
    top = pool_topologies.chain()
    weights = initial(top)
    plan = planned(top, traced(top, weights))
    facts = Facts(plan, plan_checks.check(plan), weights)
    (right,) = trial.reference(top, weights, steps=1)

    def judged(
        told: Prediction | None,
        factor: float = 1.0,
        *,
        differing: tuple[str, ...] = (),
        loss: float = 1.0,
        is_control: bool = False,
    ) -> Kill:
        grads = {lane: dict(tensors) for lane, tensors in right.grads.items()}
        grads[PAIR[0]][PAIR[1]] = factor * grads[PAIR[0]][PAIR[1]]
        losses = {**right.losses, PAIR[0]: loss * right.losses[PAIR[0]]}
        found: Outcome = replace(right, grads=grads, losses=losses, differing=differing)
        if isinstance(told, Gradient):
            told = Gradient(told.value * right.grads[PAIR[0]][PAIR[1]])
        table = {} if told is None else {PAIR: told}
        mutant = Mutant("one", lambda plan: plan, lambda _: table, is_control=is_control)
        return kills.judged(mutant, facts, right, found, size="(2, 4, 1)")

    return judged


def test_mutant_is_killed_where_its_ratio_is_met(judge: Callable[..., Kill]) -> None:
    found = judge(Ratio(0.5), 0.5)

    assert (found.state, found.predicted) == ("killed", "near on deep x 0.5")
    assert judge(Ratio(0.5), 0.5 + 1e-10).state == "killed"


@pytest.mark.parametrize("factor", [1.0, 0.5 + 1e-8, 0.0, 2.0])
def test_mutant_survives_with_another_ratio(judge: Callable[..., Kill], factor: float) -> None:
    found = judge(Ratio(0.5), factor)

    assert found.state == "survived"
    assert found.found.startswith("near on deep.weight: 0.5 predicted, ratio")


def test_mutant_survives_where_a_one_was_predicted_and_is_not(judge: Callable[..., Kill]) -> None:
    assert judge(None, 0.5).state == "survived"
    assert judge(Ratio(1.0), 1 + 1e-8).state == "survived"


def test_mutant_of_ones_is_listed_and_a_control_held(judge: Callable[..., Kill]) -> None:
    assert judge(Ratio(1.0)).state == "listed"
    assert judge(None).predicted == "the same program"
    assert judge(Ratio(0.5), 0.5, is_control=True).state == "held"
    assert judge(Ratio(0.5), 1.0, is_control=True).state == "survived"


def test_predicted_gradient_is_met_as_a_tensor(judge: Callable[..., Kill]) -> None:
    assert judge(Gradient(torch.tensor(0.7)), 0.7).state == "killed"
    assert judge(Gradient(torch.tensor(0.7)), 0.7 + 1e-8).state == "survived"
    assert judge(Gradient(torch.tensor(1.0))).state == "listed"


def test_structural_mutant_is_seen_by_its_error_or_its_loss(judge: Callable[..., Kill]) -> None:
    assert judge(Structural(), 1 + 1e-5).state == "killed"
    assert judge(Structural(), 1 + 1e-7).state == "survived"
    assert judge(Structural(), loss=1.1).state == "killed"


def test_replicas_differ_where_predicted_and_nowhere_else(judge: Callable[..., Kill]) -> None:
    assert judge(Differs(), differing=("deep.weight",)).state == "killed"
    assert judge(Differs()).state == "survived"
    assert judge(Differs(), differing=("deep.weight", "wide.bias")).state == "survived"
    assert judge(Ratio(0.5), 0.5, differing=("deep.weight",)).state == "survived"


# Sizes and counts that a check takes


def test_sizes_are_named_in_the_order_of_the_pools() -> None:
    named = sizes.named(pool_topologies.global_sums())

    assert named.label == "(4, 2x2)"
    assert named.symbols == {"n_one": 4, "n_many": 4, "n_per_block": 2, "n_blocks": 2}


def test_sizes_are_those_asked_for_or_the_files_own_or_found() -> None:
    top = pool_topologies.chain()
    trace = traced(top)
    bare = pool_topologies.chain()
    bare.sizes.clear()

    asked = sizes.of(top, trace, [{"a": 1}])
    own = sizes.of(top, trace, None)
    others = sizes.of(bare, trace, None)

    assert [one.size for one in asked] == [{"a": 1, "b": 4, "c": 1}]
    assert [one.size["a"] for one in own] == [2, 3]
    assert len(others) == 3
    for one in others[1:]:
        plan_checks.check(planned(one, trace))
        assert sum(pool.size for pool in one.pools.values()) <= sizes.MAX_RANKS
    for name in top.pools:
        assert any(one.size[name] != top.size[name] for one in others[1:])


def test_even_counts_take_the_verdict_where_rows_hide_or_nothing_else_shows() -> None:
    hidden = evenness({"a": [[3, 3]], "b": [[1, 2]]}, {"a": [1, 2, 2, 1], "b": [1, 0, 1, 1]})
    alike = evenness({"a": [[2, 2]], "b": [[1, 2]]}, {"a": [1] * 4, "b": [1, 0, 1, 1]})
    nothing = evenness({"a": [[2, 2], [1, 1, 1]]}, {"a": [1] * 4})
    seen = evenness({"a": [[2, 2], [1, 2, 1]]}, {"a": [1] * 4})

    assert "rows of ['a'] differ in count" in hidden.no_verdicts[0]
    assert (alike.no_verdicts, len(alike.remarks)) == ((), 1)
    assert "of every term there is" in nothing.no_verdicts[0]
    assert (seen.no_verdicts, seen.remarks) == ((), ())
