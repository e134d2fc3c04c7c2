"""What a topology refuses while it is declared, by name, and that nothing changes by it."""
# ruff: noqa: ARG005 -- names of arguments are what is declared

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError, ProtocolError
from atoll.pools import Counted, Through, Topology
from atoll.pools.declared import Pool


class Declared:
    """A topology with one of everything, and its handles."""

    def __init__(self) -> None:
        self.top = Topology(rows=12)
        self.plain = self.top.pool("plain", ranks=3)
        self.parted = self.top.pool("parted", ranks=2, blocks=2)
        self.top.axis("site", ["a", "b"], over=self.parted)
        top = self.top
        top.parameters(owner=self.plain)(weights)
        top.value(on=self.plain)(code)
        top.state(on=self.plain)(kept)


def weights() -> nn.Module:
    return nn.Linear(2, 2)


def code(weights, rows):
    return weights(rows)


def kept(draw):
    return draw.uniform(2)


def batch(index, draw):
    return draw.normal(2)


Change = Callable[[Declared], Any]


def wrong(value: Any) -> Any:
    """What mypy would refuse, too."""
    return value


def term(call: Callable[..., Any], **options: Any) -> Change:
    return lambda d: d.top.term(on=d.plain, **options)(call)


def stranger(d: Declared) -> Any:
    return d.top.value(on=Pool("plain", 4))(batch)


def late_axis(d: Declared) -> Any:
    return d.top.axis("late", ["x", "y"], over=d.plain)


REFUSED: dict[str, tuple[Change, str]] = {
    "lambda": (term(lambda nobody: None), r"'<lambda>' is no name"),
    "pool twice": (lambda d: d.top.pool("plain", ranks=1), "'plain' is declared twice"),
    "pool called world": (lambda d: d.top.pool("world", ranks=1), "'world' is declared twice, or"),
    "pool with a slash": (lambda d: d.top.pool("plain/0", ranks=1), "'plain/0' is no name"),
    "pool of no ranks": (lambda d: d.top.pool("new", ranks=0), "ranks=0 must be an integer of at"),
    "pool of true ranks": (lambda d: d.top.pool("new", ranks=True), "ranks=True must be an int"),
    "pool of no blocks": (lambda d: d.top.pool("new", ranks=1, blocks=0), "blocks=0 must be"),
    "axis called rows": (lambda d: d.top.axis("rows", ["x"], over=d.plain), "'rows' is declared"),
    "axis of a stranger": (
        lambda d: d.top.axis("new", ["x"], over=Pool("far", 2)),
        "pool 'far' is not of this topology; its pools are",
    ),
    "axis after functions": (late_axis, "axis 'late' is declared after .'weights', 'code', 'kept'"),
    "second axis of a pool": (
        lambda d: d.top.axis("new", ["x"], over=d.parted),
        "axis 'new' over pool 'parted' .* the pool has axes .'site'.",
    ),
    "pool of another topology": (stranger, "pool 'plain' is not of this topology"),
    "rows that ask for an axis": (
        lambda d: d.top.rows(lambda index, site: index),
        r"rows 'rows' asks for \['site'\]; it may ask for \['index', 'draw'\]",
    ),
    "sizes of a stranger": (lambda d: d.top.sized(far=2), r"sizes name \['far'\]; the pools are"),
    "sizes of three": (lambda d: d.top.sized(parted=wrong((1, 2, 3))), r"size parted=\(1, 2, 3\)"),
    "other sizes of a stranger": (lambda d: d.top.also_at(far=2), r"sizes name \['far'\]"),
    "other sizes of nothing": (lambda d: d.top.also_at(plain=0), "ranks=0 must be an integer"),
}


def snapshot(top: Topology) -> tuple[Any, ...]:
    return dict(top.pools), dict(top.axes), dict(top.functions), list(top.sizes)


@pytest.mark.parametrize("name", REFUSED)
def test_declaration_is_refused_by_name_and_changes_nothing(name: str) -> None:
    change, words = REFUSED[name]
    declared = Declared()
    before = snapshot(declared.top)

    with pytest.raises(ConfigError, match=words):
        change(declared)

    assert snapshot(declared.top) == before


def declared_by(d: Declared, source: str, decorator: Callable[[Any], Any]) -> Any:
    """Declares the one function of a text."""
    found: dict[str, Any] = {"Counted": Counted}
    exec(source, found)
    return decorator(found["f"])


FUNCTIONS: dict[str, tuple[str, Callable[[Declared], Callable[[Any], Any]], str]] = {
    "unknown name": (
        "def f(nobody, rows): ...",
        lambda d: d.top.term(on=d.plain),
        r"term 'f' asks for \['nobody'\]; it may ask for \['rows', 'draw', 'site', 'weights', "
        r"'code', 'kept'\], declared before it",
    ),
    "index by a term": (
        "def f(index): ...",
        lambda d: d.top.term(on=d.plain),
        r"term 'f' asks for \['index'\]",
    ),
    "pool by a term": (
        "def f(plain): ...",
        lambda d: d.top.term(on=d.plain),
        r"term 'f' asks for \['plain'\]",
    ),
    "star": ("def f(*rows): ...", lambda d: d.top.value(on=d.plain), r"f takes \*rows"),
    "keywords": ("def f(**rows): ...", lambda d: d.top.value(on=d.plain), r"f takes \*\*rows"),
    "once with rows": (
        "def f(weights, rows): ...",
        lambda d: d.top.term(on=d.plain, once=True),
        r"term 'f' asks for \['rows'\]; with once=True it may ask for \['site', 'weights'\]",
    ),
    "once with a draw": (
        "def f(weights, draw): ...",
        lambda d: d.top.term(on=d.plain, once=True),
        r"term 'f' asks for \['draw'\]",
    ),
    "once with a value": (
        "def f(code): ...",
        lambda d: d.top.term(on=d.plain, once=True),
        r"term 'f' asks for \['code'\]",
    ),
    "once with state": (
        "def f(kept): ...",
        lambda d: d.top.term(on=d.plain, once=True),
        r"term 'f' asks for \['kept'\]",
    ),
    "value with state": (
        "def f(kept): ...",
        lambda d: d.top.value(on=d.plain),
        r"value 'f' asks for \['kept'\]",
    ),
    "state with parameters": (
        "def f(weights): ...",
        lambda d: d.top.state(on=d.plain),
        r"state 'f' asks for \['weights'\]",
    ),
    "parameters with rows": (
        "def f(rows): ...",
        lambda d: d.top.parameters(owner=d.plain),
        r"parameters 'f' asks for \['rows'\]",
    ),
    "parameters with a draw": (
        "def f(draw): ...",
        lambda d: d.top.parameters(owner=d.plain),
        r"parameters 'f' asks for \['draw'\]",
    ),
    "state of another pool": (
        "def f(kept, site): ...",
        lambda d: d.top.term(on=d.parted),
        "term 'f' on pool 'parted' asks for state 'kept' of pool 'plain'",
    ),
    "axis not asked for": (
        "def f(code): ...",
        lambda d: d.top.term(on=d.parted),
        "term 'f' is on pool 'parted', whose blocks share out axis 'site', and does not ask for it",
    ),
    "parameters without the axis": (
        "def f(): ...",
        lambda d: d.top.parameters(owner=d.parted),
        "parameters 'f' is on pool 'parted', whose blocks share out axis 'site'",
    ),
    "coefficient of NaN": (
        "def f(code): ...",
        lambda d: d.top.term(on=d.plain, coeff=float("nan")),
        "coeff=nan of 'f' must be a finite number",
    ),
    "coefficient of text": (
        "def f(code): ...",
        lambda d: d.top.term(on=d.plain, coeff=wrong("5")),
        "coeff='5' of 'f' must be a finite number",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_refused_by_name_and_changes_nothing(name: str) -> None:
    source, decorator, words = FUNCTIONS[name]
    declared = Declared()
    before = snapshot(declared.top)

    with pytest.raises(ConfigError, match=words):
        declared_by(declared, source, decorator(declared))

    assert snapshot(declared.top) == before


@pytest.mark.parametrize("word", ["rows", "draw", "index", "world", "all", "plain", "site", "code"])
def test_function_is_refused_under_a_name_in_use(word: str) -> None:
    declared = Declared()

    with pytest.raises(ConfigError, match=f"'{word}' is declared twice, or is a word of its own"):
        declared_by(
            declared,
            f"def {word}(weights): ...\nf = {word}",
            declared.top.term(on=declared.plain),
        )


def test_rows_are_refused_twice() -> None:
    top = Declared().top
    top.rows(batch)

    with pytest.raises(ConfigError, match="'rows' is declared twice"):
        top.rows(batch)


def test_function_without_a_name_is_refused() -> None:
    declared = Declared()

    with pytest.raises(ConfigError, match="'<partial>' is no name"):
        declared.top.value(on=declared.plain)(functools.partial(code, 1))


def test_function_is_called_for_one_axis_at_most() -> None:
    top = Topology(rows=4)
    first, second, third = (top.pool(name, ranks=1) for name in "abc")
    top.axis("x", ["1"], over=first)
    top.axis("y", ["1"], over=second)

    with pytest.raises(ConfigError, match=r"both asks for \['x', 'y'\]; a function is called once"):

        @top.term(on=third)
        def both(x, y): ...


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "has items"),
        ("abc", "has items 'abc'; give a list of strings"),
        (["a", ""], r"has items \[''\]"),
        (["a", 1], r"has items \[1\]"),
        (["a[0]"], r"has items \['a\[0\]'\].*without \[ and \]"),
        (["a", "a"], "whose items are all different"),
    ],
)
def test_axis_is_refused_with_items_that_cannot_be_told_apart(items: Any, words: str) -> None:
    top = Topology(rows=4)
    pool = top.pool("pool", ranks=1)

    with pytest.raises(ConfigError, match=words):
        top.axis("axis", items, over=pool)

    assert top.axes == {}


def test_topology_is_refused_without_rows_or_with_a_wire_of_integers() -> None:
    with pytest.raises(ConfigError, match="rows=0 must be an integer of at least 1"):
        Topology(rows=0)
    with pytest.raises(ConfigError, match=r"wire=torch.int8 holds no fractions"):
        Topology(rows=1, wire=torch.int8)


def test_sized_topology_keeps_functions_and_leaves_the_first_alone() -> None:
    declared = Declared()
    other = declared.top.sized(plain=6, parted=(1, 4))

    @other.value(on=other.pools["plain"])
    def more(code): ...

    assert other.size == {"plain": 6, "parted": 4}
    assert list(other.pools) == list(declared.top.pools)
    assert declared.top.size == {"plain": 3, "parted": (2, 2)}
    assert "more" not in declared.top.functions


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Counted(torch.ones(3), 1, "rows"), r"Counted.total has shape \(3,\)"),
        (
            lambda: Counted(wrong(1.5), 1, "rows"),
            "total of Counted is float; give a floating tensor",
        ),
        (lambda: Counted(torch.tensor(3), 1, "rows"), "total of Counted is torch.int64"),
        (lambda: Through(wrong(1.5), 1, "rows", lambda s, n: s), "total of Through is float"),
        (lambda: Through(torch.ones(3), 1, "rows", wrong(2)), "Through.then=2 must be a function"),
        (
            lambda: Counted(torch.ones(()), wrong(torch.tensor(3)), "rows"),
            r"count=tensor\(3\) must be an",
        ),
        (lambda: Counted(torch.ones(()), wrong(0.5), "rows"), "count=0.5 must be an integer"),
        (lambda: Counted(torch.ones(()), -1, "rows"), "count=-1 must be an integer of at least 0"),
        (lambda: Counted(torch.ones(()), True, "rows"), "count=True must be an integer"),
    ],
)
def test_sum_is_refused_where_it_is_made(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, ProtocolError), match=words):
        make()
