"""Loop files on gloo processes: the right ones, the wrong ones by name, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import GradientsWrong
from atoll.pools.gradcheck import check as checking
from atoll.pools.gradcheck.asked import Asked
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.report import Report
from atoll.pools.loop import Loop
from tests.loops import ddp_mean, ddp_sum

LOOPS = Path(__file__).parents[1] / "loops"
EVEN = """
from atoll.pools.loop import Loop
from tests.loops import ddp_sum as right
loop = Loop(rows=12, ranks=(2, 3))
loop.model(right.model)
loop.rows(right.batch)
loop.term(coeff=0.1)(right.square)
@loop.step
def step(model, rows, coeffs):
    return right.step(model, rows, {**coeffs, "nll": 0.0}) and None
"""
BROKEN = EVEN[: EVEN.index("    return")]


def checked(path: Path, crews: Crews, **asked) -> Report:
    return checking.check_file(path, Asked(**asked), crews=crews)


def refused(crews: Crews, folder: Path, text: str) -> str:
    """Why a file with this text is not checked."""
    path = folder / "declared.py"
    path.write_text(text)
    report = checked(path, crews)
    assert report.exit_code == 2
    assert report.refusal is not None
    return report.refusal


def test_ddp_with_a_sum_hook_and_global_counts_is_right(crews):
    report = checked(LOOPS / "ddp_sum.py", crews, mutants=True)

    report.raise_if_wrong()
    assert report.worst_error < 1e-14
    assert [run.size.label for run in report.runs] == ["2", "3"]
    assert {one.kind for one in report.runs[0].logged} == {"loss", "clip norm"}
    assert report.sentences == (
        "no verdict on counts: every rank has the same count of ['square']",
    )
    assert {kill.state for kill in report.kills} == {"killed"}
    assert len(report.kills) == 13


def test_mean_of_ddp_is_named(crews):
    report = checked(LOOPS / "ddp_mean.py", crews)

    assert report.exit_code == 1
    assert report.sentences[0] == "nll on 0.weight: ratio 0.5000 at 2, 0.3333 at 3 = 1/ranks"
    assert {one.name for one in report.defects} == {"1/ranks"}
    assert len(report.defects) == 8


def test_mean_of_ddp_is_named_at_other_sizes_and_at_one_it_is_not(crews):
    several = checked(LOOPS / "ddp_mean.py", crews, sizes=[{"ranks": 3}, {"ranks": 5}])
    one = checked(LOOPS / "ddp_mean.py", crews, sizes=[{"ranks": 3}])

    assert several.sentences[0] == "nll on 0.weight: ratio 0.3333 at 3, 0.2000 at 5 = 1/ranks"
    assert "which these sizes read as 1/ranks or 1/3; run another" in one.sentences[0]


def test_token_mean_of_each_rank_is_not_a_scale(crews):
    report = checked(LOOPS / "local_mean.py", crews, mutants=True)

    wrong = [one for one in report.defects if one.term == "nll"]
    assert report.exit_code == 1
    assert {one.what for one in wrong} == {"not a scale"}
    assert "not a scale: ranks are weighed unevenly, residual 0." in wrong[0].sentence
    assert [one.term for one in report.defects if one.what == "loss"] == ["all"]
    assert not any(one.term == "square" for one in report.defects)
    assert report.kills == ()


def test_shards_of_fsdp2_are_made_whole_and_right_in_float32(crews):
    report = checked(LOOPS / "sharded.py", crews)

    report.raise_if_wrong()
    assert 0 < report.worst_error < 4e-7


def test_replica_that_differs_in_one_bit_is_wrong_though_the_first_is_right(crews):
    report = checked(LOOPS / "drifting.py", crews)

    assert report.sentences == ("2.bias: replicas differ at 2",)
    assert report.exit_code == 1


def test_loop_of_a_module_is_checked_from_a_test(crews):
    """In this process its data were made under another default dtype."""
    checking.check(ddp_sum.loop, crews=crews).raise_if_wrong()

    with pytest.raises(GradientsWrong, match=r"gradients of ddp_mean\.py: wrong\n.*= 1/ranks"):
        checking.check(ddp_mean.loop, crews=crews).raise_if_wrong()


def test_object_of_another_kind_is_refused(crews):
    report = checking.check(3, crews=crews)

    assert report.exit_code == 2
    assert report.refusal == "'int' is not a Topology or Loop, which are what can be checked"


def test_loop_that_stands_in_no_file_is_refused(crews):
    made = [Loop(rows=4)]

    assert "make it at the top level of one" in str(checking.check(made[0], crews=crews).refusal)


def test_local_ranks_are_refused_for_a_loop(crews):
    assert "ranks='local' is asked of a Loop" in str(
        checked(LOOPS / "ddp_sum.py", crews, ranks="local").refusal
    )


@pytest.mark.parametrize("sizes", [{"ranks": (2, 2)}, {"ci": 2}, {"ranks": 2, "ci": 2}])
def test_sizes_that_a_loop_does_not_have_are_refused(crews, sizes):
    report = checked(LOOPS / "ddp_sum.py", crews, sizes=[sizes])

    assert "it has ranks=N alone" in str(report.refusal)


def test_more_ranks_than_rows_are_refused(crews):
    report = checked(LOOPS / "ddp_sum.py", crews, sizes=[{"ranks": 13}])

    assert "ranks=(13,) with rows=12" in str(report.refusal)


# Files


def test_file_without_a_loop_is_refused(crews, tmp_path):
    assert "holds no Topology or Loop at its top level" in refused(crews, tmp_path, "x = 1")


def test_file_with_two_loops_is_refused_by_their_names(crews, tmp_path):
    text = "from atoll.pools.loop import Loop\na, b = Loop(rows=4), Loop(rows=4)"

    assert "holds 2 of Topology or Loop: a, b;" in refused(crews, tmp_path, text)


def test_one_loop_under_two_names_is_one(crews, tmp_path):
    text = "from atoll.pools.loop import Loop\na = Loop(rows=4)\nb = a"

    assert "lacks @loop.model" in refused(crews, tmp_path, text)


def test_file_that_raises_is_refused_with_the_place(crews, tmp_path):
    said = refused(crews, tmp_path, "x = 1\n1 / 0")

    assert "ZeroDivisionError: division by zero (declared.py:2)" in said


def test_loop_without_a_step_is_refused(crews, tmp_path):
    text = EVEN[: EVEN.index("@loop.step")]

    assert "lacks @loop.step" in refused(crews, tmp_path, text)


def test_file_may_import_what_lies_in_the_working_directory(crews, tmp_path, monkeypatch):
    (tmp_path / "beside_the_loop.py").write_text("RANKS = (2, 3)")
    text = (LOOPS / "ddp_sum.py").read_text().replace("ranks=(2, 3)", "ranks=RANKS")
    (tmp_path / "declared.py").write_text(f"from beside_the_loop import RANKS\n{text}")
    monkeypatch.chdir(tmp_path)

    checked(Path("declared.py"), crews, sizes=[{"ranks": 3}]).raise_if_wrong()


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_file_is_loaded_and_run_under_the_dtype_of_its_loop(crews, tmp_path, name):
    """The first load, which finds the loop, is under float64; ranks load it once."""
    text = EVEN.replace("ranks=(2, 3)", f"ranks=(2, 3), dtype=torch.{name}")
    made = f"import torch\nMADE = torch.zeros(1).dtype{text}"
    step = f"{made}    assert (MADE, model[0].weight.dtype) == (torch.{name},) * 2\n"
    (tmp_path / "declared.py").write_text(step.replace("    return", "    done =", 1))

    report = checked(tmp_path / "declared.py", crews)

    assert report.verdict == "no verdict", report.sentences  # its counts are even
    assert report.tolerance == {"float64": 1e-12, "float32": 4e-7}[name]


# Steps that break


def test_step_that_raises_on_one_rank_is_refused_with_its_text(crews, tmp_path):
    text = BROKEN + "    import torch.distributed as dist\n    [1][dist.get_rank()]\n"

    said = refused(crews, tmp_path, text + "    dist.barrier()")

    assert "'run' on 2 ranks: rank 1: IndexError: list index out of range (declared.py:11)" in said


def test_step_that_returns_something_else_is_refused(crews, tmp_path):
    assert "returned ['lr']; it returns None" in refused(
        crews, tmp_path, BROKEN + "    return {'lr': 3}"
    )


def test_step_that_logs_an_unknown_term_is_refused(crews, tmp_path):
    assert "the ranks logged the loss of ['nlll']" in refused(
        crews, tmp_path, BROKEN + "    return {'losses': {'nlll': 3}}"
    )


def test_rows_that_differ_from_process_to_process_are_refused(crews, tmp_path):
    text = EVEN.replace("right.batch", "lambda index: (right.X[index] + os.getpid(),)")

    said = refused(crews, tmp_path, "import os" + text)

    assert "are other ones than the reference has under the same numbers" in said


def test_step_that_leaves_no_gradient_is_dead(crews, tmp_path):
    (tmp_path / "declared.py").write_text(BROKEN + "    pass")

    report = checked(tmp_path / "declared.py", crews)

    assert report.exit_code == 1
    assert {one.what for one in report.defects} == {"dead"}


# The command


def test_command_reports_all_files_with_the_exit_code_of_the_worst(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    paths = [LOOPS / "ddp_sum.py", tmp_path / "even.py", LOOPS / "ddp_mean.py", tmp_path / "no.py"]

    done = CliRunner().invoke(app, ["gradcheck", *map(str, paths), "--mutants", "--json"])

    told = json.loads(done.stdout)
    assert (done.exit_code, told["exit_code"]) == (1, 1)
    assert [one["exit_code"] for one in told["files"]] == [0, 3, 1, 2]
    assert [one["subject"] for one in told["files"]] == [str(path) for path in paths]
    assert {one["state"] for one in told["files"][0]["mutants"]} == {"killed"}
    assert any("mean of the ranks' means" in one for one in told["files"][1]["no_verdicts"])


def test_command_shows_ratios_sentences_and_mutants():
    done = CliRunner().invoke(
        app,
        ["gradcheck", str(LOOPS / "ddp_sum.py"), str(LOOPS / "drifting.py"), "--mutants"],
    )

    assert done.exit_code == 1
    assert "nll on 0 (2 tensors)" in done.stdout
    assert "first row twice, last left out" in done.stdout
    assert "mutants by size: 13 killed as predicted" in done.stdout
    assert "ddp_sum.py: right, worst error" in done.stdout
    assert "2.bias: replicas differ at 2" in done.stdout
    assert "drifting.py: wrong" in done.stdout
