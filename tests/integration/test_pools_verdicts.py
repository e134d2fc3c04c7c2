"""Verdicts of `check` on small topologies: right ones pass, wrong ones are named or refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.pools import Counted, Topology, check
from tests import pool_topologies


@pytest.mark.parametrize("shape", pool_topologies.SHAPES)
def test_shape_is_right_and_its_mutants_are_seen_as_predicted(shape: str) -> None:
    top = pool_topologies.SHAPES[shape]()

    report = check(top, mutants=True)

    report.raise_if_wrong()
    assert report.worst_error < 1e-13
    assert {one.state for one in report.kills} <= {"killed", "listed", "held"}
    assert len(report.kills) > 30


def simple(term: Callable[..., Any], **bodies: Any) -> Topology:
    """One value over an edge and one term, at two sizes."""
    top = Topology(rows=12, wire=bodies.get("wire"))
    first, second = top.pool("first", ranks=2), top.pool("second", ranks=4)
    top.also_at(first=3, second=1)

    @top.rows
    def batch(index, draw):
        found = {"x": draw.normal(3), "n": 1 + index**2 % 5, "index": index}
        return bodies.get("given", lambda rows: rows)(found)

    @top.parameters(owner=first)
    def weights():
        return bodies.get("weights", lambda: nn.Linear(3, 2))()

    @top.value(on=first)
    def code(weights, rows):
        return bodies.get("value", lambda w, rows: torch.tanh(w(rows["x"])))(weights, rows)

    @top.term(on=second, coeff=2.0)
    def fit(code, rows):
        return term(code, rows)

    return top


def tokens(code: Any, rows: Any) -> Counted:
    total = ((code - 1).square().sum(1) * rows["n"]).sum()
    return Counted(total, int(rows["n"].sum()), "tokens")


def test_simple_topology_is_right() -> None:
    assert check(simple(tokens)).verdict == "right"


def local_mean(code: Any, rows: Any) -> Counted:
    """Divided before it is counted."""
    counted = tokens(code, rows)
    return Counted(counted.total / counted.count, counted.count, "tokens")


def constant_count(code: Any, rows: Any) -> Counted:
    return Counted(tokens(code, rows).total, int(rows["n"].sum()) + 7, "tokens")


def batch_statistic(code: Any, rows: Any) -> Counted:
    centred = code - code.mean(0, keepdim=True)
    return Counted((centred.square().sum(1) * rows["n"]).sum(), int(rows["n"].sum()), "tokens")


def one_per_call(code: Any, rows: Any) -> Counted:
    """A mean of means: each call counts as one."""
    return Counted(tokens(code, rows).total / float(rows["n"].sum()), 1, "batches")


SHARED = nn.Linear(3, 2)
GENERATOR = torch.Generator().manual_seed(5)


def unkeyed(rows: Any) -> Any:
    """Noise of a generator of the file's own: another for each call."""
    noise = torch.randn(rows["x"].shape, generator=GENERATOR, dtype=rows["x"].dtype)
    return {**rows, "x": rows["x"] + noise}


def all_rows(rows: Any) -> Any:
    """The same twelve rows, whichever were asked for."""
    x = torch.arange(36, dtype=torch.get_default_dtype()).view(12, 3).sin()
    return {**rows, "whole": x}


def of_all_rows(code: Any, rows: Any) -> Counted:
    total = tokens(code, rows).total + rows["whole"].sum()
    return Counted(total, len(rows["whole"]), "rows")


WRONG: dict[str, tuple[Callable[[], Topology], str]] = {
    "divided before it is counted": (lambda: simple(local_mean), "fit on weights.weight: ratio"),
    "a constant in each call's count": (
        lambda: simple(constant_count),
        "count of fit as logged",
    ),
    "a statistic over the batch": (lambda: simple(batch_statistic), "not a scale"),
    "a mean of means": (lambda: simple(one_per_call), "fit on weights.weight: ratio"),
    "a generator of the file": (lambda: simple(tokens, given=unkeyed), "not a scale"),
    "rows that are not by index": (
        lambda: simple(of_all_rows, given=all_rows),
        "count of fit as logged: 48 at (2, 4)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_topology_is_told_what_is_wrong(name: str) -> None:
    make, words = WRONG[name]

    report = check(make())

    assert report.verdict == "wrong", report.sentences
    assert any(words in one for one in report.sentences), report.sentences


def nan(code: Any, rows: Any) -> Counted:
    return Counted((code * torch.nan).sum(), len(rows["x"]), "rows")


def only_in_rows(code: Any, rows: Any) -> Counted:
    """Raises where a rank has few rows."""
    return Counted(code[:12].sum() + code[11].sum(), len(rows["x"]), "rows")


REFUSED: dict[str, tuple[Callable[[], Topology], str]] = {
    "NaN": (
        lambda: simple(nan),
        "norm nan; the check needs rows and weights at which it is finite",
    ),
    "dropout": (
        lambda: simple(tokens, value=lambda w, rows: nn.functional.dropout(w(rows["x"]))),
        "value 'code' uses torch's own generator (as dropout does)",
    ),
    "an error on ranks alone": (
        lambda: simple(only_in_rows),
        "term 'fit' raised while it was called: IndexError",
    ),
    "a value in place": (
        lambda: simple(lambda code, rows: tokens(code.mul_(2), rows)),
        "term 'fit' changes ['code'] in place",
    ),
    "a value of all rows": (
        lambda: simple(tokens, given=all_rows, value=lambda w, rows: w(rows["whole"])),
        "'code' is Tensor (torch.float64 (12, 2)); values and state are tensors of torch.float64 "
        "whose first dimension has the 1 rows",
    ),
    "nothing counted": (
        lambda: simple(lambda code, _: Counted(code.sum(), 0, "rows")),
        "term 'fit' counted nothing in this step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_topology_that_cannot_be_checked_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]

    report = check(make())

    assert report.verdict == "refused", report.sentences
    assert words in str(report.refusal)
    assert not [one for one in threading.enumerate() if one.name.startswith("rank-")]


def late(code: Any, rows: Any) -> Counted:
    """Only the last rows count: some ranks have none."""
    n = (rows["index"] % 12 > 6).double()
    return Counted((code.square().sum(1) * n).sum(), int(n.sum()), "tokens")


RIGHT: dict[str, Callable[[], Topology]] = {
    "ranks that count nothing": lambda: simple(late),
    "a shared module of the file": lambda: simple(tokens, weights=lambda: SHARED),
    "a frozen bias": lambda: simple(tokens, weights=frozen_bias),
    "a term that is linear in its value": lambda: simple(linear),
    "a term without parameters": lambda: logging_too(simple(tokens)),
}


def linear(code: Any, rows: Any) -> Counted:
    """Its gradient does not depend on the value: only the loss shows one that was lost."""
    total = (code * rows["x"][:, :2] * rows["n"][:, None]).sum()
    return Counted(total, int(rows["n"].sum()), "tokens")


def frozen_bias() -> nn.Module:
    found = nn.Linear(3, 2)
    found.bias.requires_grad_(False)
    return found


def logging_too(top: Topology) -> Topology:
    @top.term(on=top.pools["second"])
    def shown(rows):
        return Counted(rows["x"].square().sum(), int(rows["n"].sum()), "tokens")

    return top


@pytest.mark.parametrize("name", RIGHT)
def test_right_topology_passes_with_its_mutants(name: str) -> None:
    report = check(RIGHT[name](), mutants=True)

    report.raise_if_wrong()
    assert report.kills


def test_mutants_are_checked_after_one_step_too() -> None:
    report = check(simple(tokens), steps=1, mutants=True)

    report.raise_if_wrong()
    assert {run.step for run in report.runs} == {1}


def test_check_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0 compares nothing"):
        check(simple(tokens), steps=0)


def test_wire_is_told_beside_and_not_counted() -> None:
    report = check(simple(tokens, wire=torch.bfloat16))

    assert report.verdict == "right"
    assert report.worst_error < 1e-13
    told = [one for one in report.remarks if one.startswith("with torch.bfloat16 on the wire, at")]
    assert len(told) == 2
    assert all(1e-5 < float(one.rsplit(" ", 1)[1]) < 0.1 for one in told)


def test_equal_counts_and_single_ranks_give_no_verdict() -> None:
    even = check(simple(lambda code, _: Counted(code.square().sum(), len(code), "rows")))
    alone = check(simple(tokens), sizes=[{"first": 1, "second": 1}], mutants=True)

    assert even.verdict == "no verdict"
    assert "every rank has the same count of ['fit']" in even.sentences[0]
    assert alone.verdict == "no verdict"
    assert any("is the same program at every size" in one for one in alone.sentences)


def test_sizes_that_do_not_fit_are_refused_with_both_numbers() -> None:
    report = check(simple(tokens), sizes=[{"first": 4, "second": 6}])

    assert report.verdict == "refused"
    assert "edge 'code' from 'first' (4 ranks) to 'second' (6 ranks)" in str(report.refusal)
