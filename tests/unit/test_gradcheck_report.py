"""Reports of a check: sentences, verdicts, exit codes, the kill matrix, JSON."""

import json
import math

import pytest

from atoll.errors import GradientsWrong
from atoll.pools.gradcheck import report as reporting
from atoll.pools.gradcheck.compare import Logged, Pair, State
from atoll.pools.gradcheck.defects import Run
from atoll.pools.gradcheck.outcome import ALL, Size
from atoll.pools.gradcheck.report import Kill, KillState, Report

TWO, THREE = Size("2", {"ranks": 2}), Size("3", {"ranks": 3})


def pair(
    ratio: float | None,
    *,
    term: str = "nll",
    tensor: str = "0.weight",
    state: State = "wrong",
    residual: float = 0.0,
) -> Pair:
    """As `compare` would find it."""
    off = math.hypot((1.0 if ratio is None else ratio) - 1, residual)
    cosine = None if ratio is None else 1.0
    return Pair(term, tensor, ratio, off, cosine, state, residual)


def run(size: Size, *pairs: Pair, **other) -> Run:
    return Run(size, pairs, **({"counts": {"nll": 35}} | other))


def report(*runs: Run, **other) -> Report:
    return Report("file.py", runs, **other)


def test_right_runs_are_right_and_say_nothing():
    found = report(run(TWO, pair(1.0, state="right")), run(THREE, pair(1.0, state="right")))

    assert (found.verdict, found.exit_code, found.sentences) == ("right", 0, ())
    found.raise_if_wrong()


def test_scale_is_named_over_all_sizes():
    found = report(run(TWO, pair(0.5)), run(THREE, pair(1 / 3)))

    assert found.sentences == ("nll on 0.weight: ratio 0.5000 at 2, 0.3333 at 3 = 1/ranks",)
    assert found.defects[0].name == "1/ranks"
    assert (found.verdict, found.exit_code) == ("wrong", 1)


def test_scale_that_is_1_at_one_size_is_named_with_it():
    sizes = [Size("a", {"n_ci": 2, "n_per_block": 2}), Size("b", {"n_ci": 7, "n_per_block": 3})]
    at = [run(sizes[0], pair(1.0, state="right")), run(sizes[1], pair(7 / 3))]

    assert report(*at).defects[0].name == "n_ci/n_per_block"


def test_scale_at_one_size_is_told_with_its_readings_and_no_name():
    found = report(run(TWO, pair(2.0)))

    (sentence,) = found.sentences
    assert sentence == (
        "nll on 0.weight: ratio 2.0000 at 2, which these sizes read as ranks or 2; "
        "run another size to tell"
    )
    assert found.defects[0].name is None


def test_scale_that_no_expression_fits_says_so():
    (sentence,) = report(run(TWO, pair(0.713)), run(THREE, pair(0.911))).sentences

    assert sentence.endswith("no product of sizes and counts fits at all of them")


def test_residual_means_it_is_not_a_scale():
    """Also where the ratio itself would have a name."""
    found = report(run(TWO, pair(0.5, residual=0.08)), run(THREE, pair(1 / 3, residual=0.14)))

    assert found.sentences == (
        "nll on 0.weight: ratio 0.5000 at 2, 0.3333 at 3: not a scale: ranks are weighed "
        "unevenly, residual 0.08 to 0.14",
    )
    assert found.defects[0].what == "not a scale"


def test_dead_path_is_told():
    found = report(run(TWO, pair(0.0)), run(THREE, pair(0.0)))

    assert found.sentences[0].endswith("ratio 0.0000 at 2, 0.0000 at 3: no gradient of it arrives")


def test_unobserved_pair_is_wrong():
    found = report(run(TWO, pair(None, state="unobserved")))

    assert found.exit_code == 1
    assert "nll on 0.weight: unobserved at 2, below 1e-08" in found.sentences[0]


def test_leak_is_told_with_its_size():
    leak = Pair("nll", "0.weight", None, 0.125, None, "leak")

    (sentence,) = report(run(TWO, leak)).sentences

    assert sentence.endswith("not connected in the reference, yet a gradient of norm 0.125 at 2")


def test_gradient_that_is_not_finite_is_told():
    bad = Pair("nll", "0.weight", None, math.inf, None, "wrong", math.inf)

    found = report(run(TWO, bad))

    assert found.sentences == ("nll on 0.weight: the gradient holds NaN or infinity at 2",)
    assert found.worst_error == math.inf


def test_all_terms_together_are_told_only_where_no_term_alone_is_wrong():
    every = pair(0.7, term=ALL, residual=0.1)

    with_cause = report(run(TWO, pair(0.5), every), run(THREE, pair(1 / 3), every))
    alone = report(run(TWO, every), run(THREE, every))

    assert [one.term for one in with_cause.defects] == ["nll"]
    assert [one.term for one in alone.defects] == [ALL]


def test_replicas_that_differ_are_wrong():
    right = pair(1.0, state="right")

    found = report(run(TWO, right), run(THREE, right, differing=("2.bias",)))

    assert found.sentences == ("2.bias: replicas differ at 3",)
    assert found.exit_code == 1


def test_clip_norm_is_named_by_a_root():
    two = run(TWO, logged=(Logged("clip norm", "", 5.0, 5.0 * math.sqrt(2), True),))
    three = run(THREE, logged=(Logged("clip norm", "", 5.0, 5.0 * math.sqrt(3), True),))

    assert report(two, three).sentences == (
        "clip norm: ratio 1.4142 at 2, 1.7321 at 3 = sqrt(ranks)",
    )


def test_logged_loss_is_named_and_a_count_is_told_as_it_is():
    loss = [Logged("loss", "nll", 3.0, 3.0 * n, True) for n in (2, 3)]
    count = Logged("count", "nll", 35, 34, True)

    found = report(run(TWO, logged=(loss[0], count)), run(THREE, logged=(loss[1], count)))

    assert found.sentences == (
        "loss of nll as logged: ratio 2.0000 at 2, 3.0000 at 3 = ranks",
        "count of nll as logged: 34 at 2, 34 at 3 instead of 35",
    )


def test_defect_is_told_of_the_first_step_that_shows_it():
    right, wrong = pair(1.0, state="right"), pair(2.0)
    late = [run(TWO, right), run(THREE, right), run(TWO, wrong, step=2), run(THREE, wrong, step=2)]
    soon = [run(TWO, wrong), run(THREE, wrong), run(TWO, wrong, step=2), run(THREE, wrong, step=2)]

    assert report(*late).sentences == (
        "nll on 0.weight in step 2: ratio 2.0000 at 2, 2.0000 at 3 = 2",
    )
    assert report(*soon).sentences == ("nll on 0.weight: ratio 2.0000 at 2, 2.0000 at 3 = 2",)


def kill(state: KillState, *, mutant: str = "AVG", size: str = "2") -> Kill:
    return Kill(mutant, size, "1/ranks", "1/ranks", state)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["killed", "killed"], 0),
        (["killed", "listed"], 0),
        (["listed", "listed"], 3),
        (["killed", "survived"], 1),
        (["listed", "survived"], 1),
    ],
)
def test_mutant_must_be_killed_at_one_size_and_survive_at_none(states: list[KillState], code):
    kills = tuple(kill(state, size=size) for state, size in zip(states, "23", strict=True))

    found = report(run(TWO, pair(1.0, state="right")), kills=kills)

    assert found.exit_code == code


def test_one_mutant_does_not_stand_for_another():
    found = report(kills=(kill("killed"), kill("listed", mutant="none")))

    assert found.exit_code == 3
    assert "mutant 'none' is the same program at every size" in found.sentences[0]


def test_wrong_comes_before_refused_before_no_verdict():
    why = {"no_verdicts": ("no verdict on counts",)}
    wrong = run(TWO, pair(0.5))

    assert report(**why).exit_code == 3
    assert report(refusal="no step", **why).exit_code == 2
    assert report(wrong, refusal="no step", **why).exit_code == 1


def test_remarks_are_told_and_change_no_verdict():
    found = report(remarks=("no verdict on counts: every rank has the same count of ['b']",))

    assert found.exit_code == 0
    assert len(found.sentences) == 1


@pytest.mark.parametrize(
    "bad", [{"refusal": "no step"}, {"no_verdicts": ("alike",)}, {"kills": (kill("survived"),)}]
)
def test_anything_but_right_raises(bad):
    with pytest.raises(GradientsWrong, match=r"gradients of file\.py"):
        report(**bad).raise_if_wrong()


@pytest.mark.parametrize(
    ("codes", "together"), [((0, 0), 0), ((0, 3), 3), ((3, 2), 2), ((2, 1, 3), 1), ((), 0)]
)
def test_exit_code_of_several_files_is_that_of_the_worst(codes, together):
    made = {
        0: report(),
        1: report(run(TWO, pair(0.5))),
        2: report(refusal="no step"),
        3: report(no_verdicts=("alike",)),
    }

    assert reporting.exit_code([made[code] for code in codes]) == together


def test_json_holds_everything_and_only_what_json_has():
    bad = Pair("nll", "0.weight", None, math.inf, None, "wrong", math.inf)
    logged = (Logged("loss", "nll", 3.0, math.nan, True),)
    found = report(run(TWO, bad, logged=logged), kills=(kill("killed"),), remarks=("r",))

    told = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert told["exit_code"] == 1
    assert told["runs"][0]["pairs"][0]["error"] == "inf"
    assert told["runs"][0]["logged"][0]["found"] == "nan"
    assert told["runs"][0]["symbols"] == {"ranks": 2}
    assert told["mutants"][0]["state"] == "killed"
    assert [one["what"] for one in told["defects"]] == ["not finite", "loss"]
