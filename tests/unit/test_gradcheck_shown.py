"""What `atoll gradcheck` shows people: what is alike once, what differs by itself."""

import io

import pytest
from rich.console import Console

from atoll.cli import gradcheck_shown as shown
from atoll.pools.gradcheck.compare import Pair
from atoll.pools.gradcheck.defects import Run
from atoll.pools.gradcheck.outcome import Size
from atoll.pools.gradcheck.report import Kill, Report

TWO, THREE = Size("2", {"ranks": 2}), Size("3", {"ranks": 3})


def pair(tensor, ratio, *, term="nll", state=None):
    error = 0.0 if ratio is None else abs(ratio - 1)
    state = state or ("right" if ratio == 1 else "wrong")
    return Pair(term, tensor, ratio, error, None if ratio is None else 0.5 + ratio / 2, state)


def rows(table):
    """The cells of each row, as they are read."""
    out = io.StringIO()
    Console(file=out, width=300).print(table)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def of_runs(*pairs_of_runs, **other):
    runs = [Run(size, tuple(pairs), step=step) for size, step, pairs in pairs_of_runs]
    return Report("file.py", tuple(runs), **other)


def test_tensors_of_a_module_with_the_same_ratios_share_a_row():
    right = [pair("head[a].U", 1.0), pair("head[b].U", 1.0), pair("base.w", 1.0)]

    found = rows(shown.ratios(of_runs((TWO, 1, right), (THREE, 1, right))))

    assert found == [
        ["nll on head (2 tensors)", "1.0000", "1.0000", "1.0000", "0.0e+00"],
        ["nll on base.w", "1.0000", "1.0000", "1.0000", "0.0e+00"],
    ]


def test_tensor_with_another_ratio_at_one_size_has_a_row_of_its_own():
    right = [pair("head[a].U", 1.0), pair("head[b].U", 1.0)]
    one_wrong = [pair("head[a].U", 1.0), pair("head[b].U", 0.5)]

    found = rows(shown.ratios(of_runs((TWO, 1, right), (THREE, 1, one_wrong))))

    assert found == [
        ["nll on head[a].U", "1.0000", "1.0000", "1.0000", "0.0e+00"],
        ["nll on head[b].U", "1.0000", "0.5000", "0.7500", "5.0e-01"],
    ]


def test_cell_is_of_the_step_in_which_the_ratio_is_furthest_from_one():
    steps = [(TWO, 1, [pair("w", 1.0)]), (TWO, 2, [pair("w", 0.25)]), (TWO, 3, [pair("w", 1.5)])]

    assert rows(shown.ratios(of_runs(*steps))) == [["nll on w", "0.2500", "0.6250", "7.5e-01"]]


@pytest.mark.parametrize(
    ("state", "cell"),
    [
        ("apart", "not connected"),
        ("unobserved", "unobserved"),
        ("leak", "leak"),
        ("wrong", "not finite"),
    ],
)
def test_pair_without_a_ratio_says_why(state, cell):
    found = rows(shown.ratios(of_runs((TWO, 1, [pair("w", None, state=state)]))))

    assert found[0][1] == cell


def test_what_is_said_of_several_tensors_is_one_line():
    half = [pair("a.weight", 0.5), pair("a.bias", 0.5), pair("b.weight", 2.0)]
    third = [pair("a.weight", 1 / 3), pair("a.bias", 1 / 3), pair("b.weight", 3.0)]
    report = of_runs((TWO, 1, half), (THREE, 1, third), remarks=("only so much",))

    assert list(shown.lines(report)) == [
        "nll on a.weight and 1 more: ratio 0.5000 at 2, 0.3333 at 3 = 1/ranks",
        "nll on b.weight: ratio 2.0000 at 2, 3.0000 at 3 = ranks",
        "note: only so much",
    ]


def test_merged_line_names_the_tensor_whose_name_is_in_its_terms_too():
    half = [pair("e", 0.5, term="tree"), pair("b", 0.5, term="tree")]

    (line,) = shown.lines(of_runs((TWO, 1, half), (THREE, 1, half)))

    assert line.startswith("tree on e and 1 more: ratio 0.5000 at 2")


def test_refusal_and_what_proves_nothing_are_lines_of_their_own():
    report = Report("file.py", refusal="no rows", no_verdicts=("no verdict on counts",))

    assert list(shown.lines(report)) == ["refused: no rows", "no verdict on counts"]


def kill(mutant, size, state, changes):
    predicted = ", ".join(f"{term} {word}" for term, word in changes.items())
    return Kill(mutant, size, predicted or "the same program", "as predicted", state, changes)


def test_mutants_show_what_was_predicted_at_each_size():
    kills = (
        kill("reduce", "2", "killed", {"fit": "x 0.5", "decay": "x 0.5"}),
        kill("reduce", "3", "listed", {}),
        kill("legacy", "2", "killed", {"fit on U": "x 2", "old on U": "x 2", "decay": "x 0.25"}),
        kill("legacy", "3", "killed", {"decay": "x 0.25"}),
        kill("swapped", "2", "killed", {"fit": "another gradient"}),
        kill("swapped", "3", "survived", {"fit": "another gradient"}),
        kill("lost with its count", "2", "held", {"fit": "reweighted"}),
    )
    report = Report("file.py", kills=kills)

    assert rows(shown.mutants(report)) == [
        ["reduce", "fit, decay", "x 0.5", "same"],
        ["legacy", "fit, old on U; decay", "x 2, x 0.25", "decay x 0.25"],
        ["swapped", "fit", "other", "SURVIVED"],
        ["lost with its count", "fit", "held", "-"],
    ]
    assert shown.verdict(report) == (
        "file.py: wrong; mutants by size: 4 killed as predicted, 1 the same program there, "
        "1 controls held, 1 survived"
    )


def test_mutants_of_a_loop_show_their_prediction():
    kills = (Kill("gradient / ranks", "2", "ratio 0.5000, error 0.5", "error 0.5", "killed"),)

    found = rows(shown.mutants(Report("file.py", kills=kills)))

    assert found == [["gradient / ranks", "ratio 0.5000, error 0.5"]]


def test_long_reports_say_how_much_is_left_out(capsys):
    report = Report("file.py", no_verdicts=tuple(f"reason {n}" for n in range(shown.MAX_LINES + 2)))

    shown.show(report)

    out = capsys.readouterr().out
    assert f"reason {shown.MAX_LINES - 1}\n  and 2 more; --json has all\n" in out
    assert out.endswith("file.py: no verdict\n")
