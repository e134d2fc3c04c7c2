"""Loops: what may be declared, and the reference, its shares, counts and mutants in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.pools.counted import Counted, Through
from atoll.pools.gradcheck import loop_counts, loop_mutants, loop_ranks, tensors
from atoll.pools.gradcheck.evenness import Evenness
from atoll.pools.gradcheck.loop_ranks import Left, Told
from atoll.pools.gradcheck.loop_reference import LoopReference
from atoll.pools.gradcheck.outcome import ALL
from atoll.pools.loop import Loop, rows_of

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])
Call = Callable[[nn.Module, Any], Any]


def mean(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Counted:
    x, length = rows
    return Counted((model(x).squeeze(1).square() * length).sum(), int(length.sum()), "tokens")


def even(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Counted:
    return Counted(model(rows[0]).sum(), len(rows[0]), "rows")


def decay(model: nn.Module, rows: object) -> Counted:
    weight = next(model.parameters())
    return Counted(weight.square().sum(), weight.numel(), "weights")


def bent(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Through:
    return Through(
        model(rows[0]).square().sum(0), len(rows[0]), "rows", lambda s, n: (s / n).log().sum()
    )


def loop(*terms: Call, lengths: Tensor = LENGTHS, x: Tensor = X) -> Loop:
    """With these terms, all at 0.5 but the first."""
    made = Loop(rows=len(x), dtype=torch.float32)
    made.model(lambda: nn.Linear(3, 1))
    made.rows(lambda index: (x[index], lengths[index]))
    made.step(lambda *_: None)
    for place, term in enumerate(terms):
        made.term(coeff=0.5 if place else 1.0)(term)
    return made


def left(reference: LoopReference, ranks: int) -> Left:
    """What a right step leaves."""
    grads = reference.outcome().grads
    digests = {
        lane: {name: tensors.digest(one + 0.0) for name, one in found.items()}
        for lane, found in grads.items()
    }
    return Left(grads, [Told(digests, None)] * ranks)


# Declaring


@pytest.mark.parametrize("what", ["model", "rows", "step"])
def test_declaring_something_twice_is_refused(what):
    made = loop(mean)

    with pytest.raises(ConfigError, match=f"@loop.{what} stands twice"):
        getattr(made, what)(lambda: None)


def test_missing_parts_are_named():
    with pytest.raises(ConfigError, match=r"lacks @loop.model, @loop.rows, @loop.step, @loop.term"):
        Loop(rows=4).whole()


def test_term_needs_a_name_of_its_own():
    made = loop(mean)

    with pytest.raises(ConfigError, match="term 'mean' is declared twice"):
        made.term()(mean)


@pytest.mark.parametrize("coeff", [0.0, float("nan"), float("inf")])
def test_coefficient_that_shows_nothing_is_refused(coeff):
    with pytest.raises(ConfigError, match="must be finite and not 0"):
        Loop(rows=4).term(coeff=coeff)


@pytest.mark.parametrize("ranks", [(), (2, 2), (0,), (5,)])
def test_ranks_that_rows_cannot_be_given_to_are_refused(ranks):
    with pytest.raises(ConfigError, match="rows=4: give different numbers of ranks"):
        Loop(rows=4, ranks=ranks)


def test_dtype_without_a_tolerance_is_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        Loop(rows=4, dtype=torch.bfloat16)


def test_rows_of_all_ranks_are_all_rows_once():
    parts = [rows_of(rank, ranks=3, rows=8).tolist() for rank in range(3)]

    assert parts == [[0, 1], [2, 3, 4], [5, 6, 7]]


# The reference


def test_reference_is_the_gradient_of_the_weighed_mean():
    reference = LoopReference(loop(mean, decay))
    model = nn.Linear(3, 1)
    tensors.fill(model, reference.weights)

    squares = model(X).squeeze(1).square().repeat_interleave(LENGTHS)  # each token by itself
    (squares.mean() + 0.5 * model.weight.square().mean()).backward()
    found = reference.outcome()

    torch.testing.assert_close(found.grads[ALL]["weight"], model.weight.grad)
    torch.testing.assert_close(found.grads[ALL]["bias"], model.bias.grad)
    assert found.losses[ALL] == pytest.approx(found.losses["mean"] + found.losses["decay"])
    assert found.counts == {"mean": 15, "decay": 3}
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found.clip_norm == pytest.approx(float(norm))


def test_tensor_that_a_term_does_not_reach_is_absent_from_its_lane():
    found = LoopReference(loop(mean, decay)).outcome()

    assert {lane: sorted(grads) for lane, grads in found.grads.items()} == {
        ALL: ["bias", "weight"],
        "mean": ["bias", "weight"],
        "decay": ["weight"],
    }


@pytest.mark.parametrize("term", [mean, bent])
def test_shares_of_all_ranks_add_up_to_the_gradient(term):
    reference = LoopReference(loop(term))
    whole = reference.terms(rows_of(0, ranks=1, rows=8))

    shares = [reference.share(whole, rows_of(rank, ranks=3, rows=8)) for rank in range(3)]
    total = torch.stack([share[term.__name__]["weight"] for share in shares]).sum(0)

    torch.testing.assert_close(total, reference.outcome().grads[ALL]["weight"])


def test_weights_are_the_same_in_every_check():
    one, other = LoopReference(loop(mean)), LoopReference(loop(mean))

    assert torch.equal(one.weights["weight"], other.weights["weight"])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda _: 3.0, "returned 'float'"),
        (lambda _: Counted(torch.zeros(()), 3, "rows"), "reaches no parameter"),
        (lambda values: Counted(values.sum(), 0, "rows"), "counts 0 rows"),
        (lambda values: values.absent, r"raised AttributeError: .* \(test_loop.py:\d+\)"),
    ],
)
def test_term_that_is_none_is_refused(made, said):
    def term(model, rows):
        return made(model(rows[0]))

    with pytest.raises(ConfigError, match=said):
        LoopReference(loop(term)).outcome()


def test_model_that_is_none_is_refused():
    made = Loop(rows=4)
    made.rows(lambda index: index)
    made.step(lambda *_: None)
    made.term()(mean)
    made.model(lambda: "a model")

    with pytest.raises(ConfigError, match=r"@loop\.model returned 'str'"):
        LoopReference(made)


def test_model_with_other_tensors_each_time_is_refused():
    with pytest.raises(ConfigError, match="other tensors each time"):
        tensors.fill(nn.Linear(3, 1), tensors.weights(nn.Linear(3, 2)))


# Counts


def test_uneven_counts_leave_nothing_to_say():
    assert loop_counts.judged(LoopReference(loop(mean)), (2, 3)) == Evenness((), ())


def test_term_whose_rows_count_alike_is_a_remark_beside_an_uneven_one():
    found = loop_counts.judged(LoopReference(loop(mean, decay)), (2, 3))

    assert found.no_verdicts == ()
    assert found.remarks == ("no verdict on counts: every rank has the same count of ['decay']",)


def test_rows_of_different_count_with_equal_ranks_take_the_verdict_away():
    """The ranks hold 1+2 each; the control is the size at which they do not."""
    reference = LoopReference(loop(mean, x=X[:6], lengths=torch.tensor([1, 2, 2, 1, 1, 2])))

    hidden = loop_counts.judged(reference, (3,))

    assert len(hidden.no_verdicts) == 1
    assert "rows of ['mean'] differ in count" in hidden.no_verdicts[0]
    assert loop_counts.judged(reference, (2, 3)) == Evenness((), ())


def test_no_uneven_term_at_all_takes_the_verdict_away():
    """Eight rows on three ranks are uneven; on two they are not."""
    reference = LoopReference(loop(even, decay))

    found = loop_counts.judged(reference, (2, 4))

    assert len(found.no_verdicts) == 1
    assert "every rank has the same count of ['even', 'decay']" in found.no_verdicts[0]
    assert loop_counts.judged(reference, (2, 3)).no_verdicts == ()


# What ranks left


def test_logs_of_the_first_rank_that_has_some_are_taken():
    about = {"loss": 2.0, "losses": {"mean": 1.0}, "counts": {"mean": 15.0}, "clip_norm": 3.0}
    digests = {ALL: {"weight": "a"}}

    found = loop_ranks.outcome(Left({ALL: {}}, [Told(digests, None), Told(digests, about)]))

    assert found.losses == {"mean": 1.0, ALL: 2.0}
    assert found.counts == {"mean": 15}
    assert (found.clip_norm, found.differing) == (3.0, ())


def test_clip_norms_that_differ_between_ranks_are_told():
    digests = {ALL: {"weight": "a"}}
    ranks = [Told(digests, {"clip_norm": 3.0}), Told(digests, {"clip_norm": 4.0})]

    assert loop_ranks.outcome(Left({ALL: {}}, ranks)).differing == ("clip norm",)


def test_count_that_is_no_integer_is_refused():
    told = Told({ALL: {}}, {"counts": {"mean": 1.5}})

    with pytest.raises(ConfigError, match=r"logged 1\.5 as the count of 'mean'"):
        loop_ranks.outcome(Left({ALL: {}}, [told]))


# Digests


def test_digest_sees_one_bit_and_no_sign_of_zero_in_gradients():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[0.0, 1.0]])
    plus = tensors.gradients(model)["weight"]
    model.weight.grad = torch.tensor([[-0.0, 1.0]])
    minus = tensors.gradients(model)["weight"]
    other = torch.nextafter(plus, torch.tensor(2.0))

    assert tensors.digest(plus) == tensors.digest(minus)
    assert tensors.digest(plus) != tensors.digest(other)


@pytest.mark.parametrize(
    "other",
    [
        {"x": [X, 4]},
        {"x": [X, 3, 3]},
        {"y": [X, 3]},
        {"x": [X.double(), 3]},
        {"x": [X.flatten(), 3]},
        {"x": [X.flip(0), 3]},
    ],
)
def test_digest_sees_every_change_of_rows(other):
    assert tensors.digest({"x": [X.clone(), 3]}) == tensors.digest({"x": (X, 3)})
    assert tensors.digest({"x": [X, 3]}) != tensors.digest(other)


def test_rows_are_computed_with_in_the_dtype_of_the_check():
    found = tensors.cast_to(torch.float64, {"x": [X, LENGTHS], "n": (3, "a")})

    assert found["x"][0].dtype == torch.float64
    assert found["x"][1].dtype == torch.int64
    assert found["n"] == (3, "a")


# Mutants


def states(reference: LoopReference, ranks: int) -> dict[str, str]:
    wanted = reference.outcome()
    kills = loop_mutants.kills(reference, wanted, left(reference, ranks), tolerance=4e-7)
    return {kill.mutant: kill.state for kill in kills}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_mutant_of_a_right_loop_is_killed(ranks):
    assert states(LoopReference(loop(mean, bent, decay)), ranks) == {
        "gradient / ranks": "killed",
        **{f"rank {rank} lost, its count kept": "killed" for rank in range(ranks)},
        "mean of the ranks' means": "killed",
        "first row twice, last left out": "killed",
        "a replica differs in one bit": "killed",
    }


def test_mutants_that_are_the_same_program_are_listed():
    """Equal counts hide the mean of means, equal rows a row that is taken twice."""
    same = LoopReference(loop(mean, x=X[:1].expand(8, 3), lengths=torch.ones(8).long()))

    found = states(same, 2)

    assert found["mean of the ranks' means"] == "listed"
    assert found["first row twice, last left out"] == "listed"
    assert found["gradient / ranks"] == "killed"


def test_one_rank_lists_what_only_several_can_get_wrong():
    found = states(LoopReference(loop(mean)), 1)

    assert found["gradient / ranks"] == found["a replica differs in one bit"] == "listed"
    assert found["rank 0 lost, its count kept"] == "killed"


def test_mutant_that_is_seen_otherwise_than_predicted_survives():
    """Of gradients that are wrong to begin with no prediction holds."""
    reference = LoopReference(loop(mean))
    wanted, right = reference.outcome(), left(reference, 2)
    doubled = {lane: {k: 2 * g for k, g in at.items()} for lane, at in right.grads.items()}

    kills = loop_mutants.kills(reference, wanted, Left(doubled, right.ranks), tolerance=4e-7)

    assert {kill.state for kill in kills if "replica" not in kill.mutant} == {"survived"}
