"""The one-process reference of a topology against losses that are written by hand in torch."""
# ruff: noqa: ARG005 -- a body is given all that its kind may ask for

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError, EmptySum, LayoutMismatch
from atoll.layout import Span
from atoll.pools import Counted, Through, Topology, made
from atoll.pools.declared import Axis
from atoll.pools.gradcheck.loading import default_dtype
from atoll.pools.reference import Reference
from atoll.pools.trace import traced
from tests import pool_topologies

X = torch.arange(36, dtype=torch.float64).reshape(12, 3).sin()
N = torch.tensor([1, 4, 2, 0, 3, 1, 5, 2, 2, 1, 0, 4])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def by_hand() -> Topology:
    top = Topology(rows=6)
    a, b = top.pool("a", ranks=1), top.pool("b", ranks=1, blocks=2)
    top.axis("head", ["p", "q"], over=b)

    @top.rows
    def batch(index):
        return X[index], N[index]

    @top.parameters(owner=a)
    def base():
        return nn.Linear(3, 2)

    @top.parameters(owner=b)
    def reader(head):
        return nn.Linear(2, 1)

    @top.state(on=a)
    def moving(rows):
        return torch.zeros(len(rows[0]), 2)

    @top.value(on=a)
    def codes(base, rows):
        code = base(rows[0])
        return {"p": code.tanh(), "q": code.sigmoid()}

    @top.term(on=b, coeff=5.0)
    def fit(codes, reader, head, rows):
        loss = (reader(codes)[:, 0] - 1).square() * rows[1]
        return Counted(loss.sum(), int(rows[1].sum()), "tokens")

    @top.term(on=b, coeff=2.0, once=True)
    def small(reader, head):
        return Counted(reader.weight.abs().sum(), 2, "weights")

    @top.term(on=a, coeff=0.5)
    def bent(codes):
        both = torch.stack(list(codes.values()))
        return Through(
            both.square().sum((0, 1)), len(both[0]), "rows", lambda s, n: (s * s).sum() / n
        )

    @top.term(on=a, coeff=0.25)
    def drift(codes, moving):
        moving.value = moving.value + codes["p"]
        return Counted((codes["q"] * moving.value).sum(), len(moving.value), "rows")

    return top


def hand_losses(weights: dict[str, Tensor], rows: slice, moving: Tensor) -> dict[str, Tensor]:
    """The same in plain torch, with all weights given by name."""
    code = functional.linear(X[rows], weights["base.weight"], weights["base.bias"])
    p, q, n = code.tanh(), code.sigmoid(), N[rows]
    read = {
        "p": functional.linear(p, weights["reader[p].weight"], weights["reader[p].bias"])[:, 0],
        "q": functional.linear(q, weights["reader[q].weight"], weights["reader[q].bias"])[:, 0],
    }
    squares = torch.stack([((one - 1).square() * n).sum() for one in read.values()]).sum()
    weight = weights["reader[p].weight"].abs().sum() + weights["reader[q].weight"].abs().sum()
    s = p.square().sum(0) + q.square().sum(0)
    return {
        "fit": squares / (2 * int(n.sum())),
        "small": weight / 4,
        "bent": (s * s).sum() / len(p),
        "drift": (q * (moving + p.detach())).sum() / len(p),
    }


def test_reference_has_the_losses_and_gradients_of_plain_torch() -> None:
    top = by_hand()
    weights = made.initial(top)
    reference = Reference(top, weights)
    own = {name: one.clone().requires_grad_() for name, one in weights.items()}

    terms = reference.step(0)

    wanted = hand_losses(own, slice(0, 6), torch.zeros(6, 2))
    for name, term in terms.items():
        torch.testing.assert_close(term.loss(), wanted[name], rtol=1e-14, atol=0)
        right = torch.autograd.grad(
            wanted[name], list(own.values()), retain_graph=True, allow_unused=True
        )
        found = reference.grads(term.loss())
        expected = {k: grad for k, grad in zip(own, right, strict=True) if grad is not None}
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_reference_goes_on_with_its_state_and_the_next_rows() -> None:
    top = by_hand()
    weights = made.initial(top)
    reference = Reference(top, weights)
    code = functional.linear(X, weights["base.weight"], weights["base.bias"])

    reference.step(0)
    second = reference.step(1)

    wanted = hand_losses(weights, slice(6, 12), code[:6].tanh())
    for name, term in second.items():
        torch.testing.assert_close(term.loss().detach(), wanted[name], rtol=1e-14, atol=0)


def test_reference_of_a_part_is_its_part_of_the_sum_and_changes_nothing() -> None:
    reference = Reference(top := by_hand(), made.initial(top))
    before = reference.part(0, Span(0, 6))["drift"].parts[None].total

    parts = [reference.part(0, Span(*ends)) for ends in ((0, 1), (1, 4), (4, 6))]
    whole = reference.step(0)

    for name in ("fit", "drift"):
        for item, part in whole[name].parts.items():
            total = sum(one[name].parts[item].total for one in parts)
            assert sum(one[name].parts[item].count for one in parts) == part.count
            torch.testing.assert_close(total, part.total, rtol=1e-13, atol=0)
    assert torch.equal(whole["drift"].parts[None].total, before)


def test_reference_is_of_weights_in_the_shapes_of_the_file() -> None:
    top = by_hand()
    weights = made.initial(top)

    with pytest.raises(LayoutMismatch, match=r"weights of 'reader\[q\].bias' are not given"):
        Reference(top, {k: one for k, one in weights.items() if k != "reader[q].bias"})
    with pytest.raises(LayoutMismatch, match=r"weights of 'base.weight' are not given, or not in"):
        Reference(top, {**weights, "base.weight": torch.zeros(2, 2)})


def test_initial_weights_are_the_seeds_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()

    first, second = made.initial(by_hand()), made.initial(by_hand())

    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = by_hand()
    other.seed = 1
    assert not torch.equal(made.initial(other)["base.weight"], first["base.weight"])


# What a call shows, refused by name


def calling(**bodies: Any) -> Topology:
    """A topology of one value, one state and one term, some of which are given."""
    top = Topology(rows=6)
    pool, parted = top.pool("pool", ranks=2), top.pool("parted", ranks=1)
    top.axis("item", ["a", "b"], over=parted)

    @top.rows
    def batch(index, draw):
        return {"x": draw.normal(2)}

    @top.parameters(owner=pool)
    def weights():
        return bodies.get("weights", lambda: nn.Linear(2, 2))()

    @top.state(on=pool)
    def kept(rows):
        return bodies.get("kept", lambda rows: torch.zeros(len(rows["x"])))(rows)

    @top.value(on=pool)
    def value(weights, rows):
        return bodies.get("value", lambda weights, x: weights(x))(weights, rows["x"])

    @top.term(on=pool, once=False)
    def term(weights, value, kept, rows):
        plain = lambda value, *_: Counted(value.sum(), len(value), "rows")  # noqa: E731
        return bodies.get("term", plain)(value, kept, rows)

    @top.term(on=parted)
    def parts(item, value):
        return bodies.get("parts", lambda item, v: Counted(v.sum(), 1, "rows"))(item, value)

    return top


def through(then: Any) -> Any:
    return lambda value, kept, rows: Through(value.sum(0), 6, "rows", then)


def put(change: Any) -> Any:
    def term(value, kept, rows):
        kept.value = change(kept.value)
        return Counted(value.sum(), 6, "rows")

    return term


BUFFERED = {
    "weights": lambda: nn.BatchNorm1d(2),
    "value": lambda weights, x: weights(x),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"weights": lambda: torch.ones(2)}, "parameters 'weights' returned Tensor; retu"),
    "no tensor": ({"value": lambda w, x: [1.0] * 6}, r"'value' is list \(no tensor\); values and"),
    "integers": ({"value": lambda w, x: w(x).long()}, r"'value' is Tensor \(torch.int64 \(6, 2\)"),
    "another dtype": ({"value": lambda w, x: w(x).float()}, r"'value' is Tensor \(torch.float32"),
    "fewer rows": ({"value": lambda w, x: w(x)[1:]}, r"'value' .* \(5, 2\)\).* has the 6 rows"),
    "no rows": ({"value": lambda w, x: w(x).sum()}, r"'value' is Tensor \(torch.float64 \(\)\)"),
    "other items": (
        {"value": lambda w, x: {"a": x, "c": x}},
        r"value 'value' returns a dict of \['a', 'c'\], which are the items of no axis",
    ),
    "items out of order": (
        {"value": lambda w, x: {"b": x, "a": x}},
        r"returns a dict of \['b', 'a'\], which are the items of no axis; .* all of them and in",
    ),
    "part of an item": (
        {"value": lambda w, x: {"a": x, "b": x[:1]}},
        r"'value' of 'b' is Tensor \(torch.float64 \(1, 2\)\)",
    ),
    "state by no row": (
        {"kept": lambda rows: torch.zeros(2)},
        "'kept' is Tensor .* has the 6 rows",
    ),
    "state in another shape": (
        {"term": put(lambda kept: kept[:3])},
        r"term 'term' raised while it was called: state of shape \(6,\) was given one of \(3,\)",
    ),
    "term of a tensor": (
        {"term": lambda value, kept, rows: value.mean()},
        r"term 'term' returned Tensor; return Counted\(total, count, unit\), undivided, or",
    ),
    "term of nothing": ({"term": lambda *_: None}, "term 'term' returned NoneType"),
    "term of a tensor count": (
        {"term": lambda value, kept, rows: Counted(value.sum(), value.sum(), "rows")},
        "term 'term' raised while it was called: count=tensor",
    ),
    "term of several numbers": (
        {"term": lambda value, kept, rows: Counted(value.sum(0), 1, "rows")},
        r"term 'term' raised while it was called: Counted.total has shape \(2,\)",
    ),
    "two kinds by item": (
        {
            "parts": lambda item, v: (
                Counted(v.sum(), 1, "rows")
                if item == "a"
                else Through(v.sum(), 1, "rows", lambda s, n: s)
            )
        },
        r"term 'parts' returns \[\('Counted', 'rows'\), \('Through', 'rows'\)\] for its items",
    ),
    "two units by item": (
        {"parts": lambda item, v: Counted(v.sum(), 1, item)},
        r"term 'parts' returns \[\('Counted', 'a'\), \('Counted', 'b'\)\] for its items",
    ),
    "then of several numbers": (
        {"term": through(lambda s, n: s / n)},
        r"term 'term' raised while it was called: Through.then gave \(2,\); a term is one number",
    ),
    "then of a float": (
        {"term": through(lambda s, n: 1.0)},
        "term 'term' .* Through.then gave flo",
    ),
    "then that raises": (
        {"term": through(lambda s, n: s[5])},
        "term 'term' raised while it was called: IndexError",
    ),
    "an error": (
        {"value": lambda w, x: x[9]},
        "value 'value' raised while it was called: Index",
    ),
    "an item's error": (
        {"parts": lambda item, v: {}[item]},
        "term 'parts' of 'a' raised while it was called: KeyError",
    ),
    "parameters' error": (
        {"weights": lambda: nn.Linear(2, "x")},  # type: ignore[arg-type] # what raises
        "parameters 'weights' raised while it was called: TypeError",
    ),
    "a value changed in place": (
        {"term": lambda value, kept, rows: Counted(value.mul_(2).sum(), 6, "rows")},
        r"term 'term' changes \['value'\] in place",
    ),
    "rows changed in place": (
        {"term": lambda v, kept, rows: Counted(rows["x"].add_(1).sum() + v.sum(), 6, "rows")},
        r"term 'term' changes \['rows'\] in place",
    ),
    "buffers changed": (BUFFERED, r"value 'value' changes \['weights'\] in place .*BatchNorm"),
    "dropout": (
        {"value": lambda w, x: functional.dropout(w(x))},
        r"value 'value' uses torch's own generator \(as dropout does\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_function_is_refused_by_what_a_call_shows(name: str) -> None:
    bodies, words = REFUSED[name]
    top = calling(**bodies)

    with pytest.raises(ConfigError, match=words):
        traced(top)


def test_topology_of_the_refusals_is_right_by_itself() -> None:
    trace = traced(calling())

    assert trace.values["value"].shapes == {None: (2,)}
    assert trace.through == ()


def test_dict_is_refused_where_two_axes_have_its_items() -> None:
    top = calling(value=lambda w, x: {"a": w(x), "b": w(x)})
    top.axes["twin"] = Axis("twin", ("a", "b"), "nowhere")

    with pytest.raises(ConfigError, match=r"are the items of \['item', 'twin'\]"):
        traced(top)


def test_mean_over_nothing_is_refused_by_the_terms_name() -> None:
    top = calling(term=lambda value, kept, rows: Counted(value.sum(), 0, "rows"))
    terms = Reference(top, made.initial(top)).step(0)

    with pytest.raises(EmptySum, match="term 'term' counted nothing in this step"):
        terms["term"].loss()


def test_topology_without_rows_or_terms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"declares \[\]; it needs @top.rows"):
        traced(Topology(rows=2))


def test_once_term_is_refused_as_a_through() -> None:
    top = Topology(rows=2)
    pool = top.pool("pool", ranks=1)
    top.rows(lambda index: index)

    @top.parameters(owner=pool)
    def weights():
        return nn.Linear(1, 1)

    @top.term(on=pool, once=True)
    def bent(weights):
        return Through(weights.weight.sum(), 1, "weights", lambda s, n: s)

    with pytest.raises(ConfigError, match="term 'bent' has once=True and returns Through"):
        traced(top)


def test_tensor_under_two_parameters_is_refused() -> None:
    top = Topology(rows=2)
    pool = top.pool("pool", ranks=1)
    shared = nn.Linear(1, 1)

    @top.parameters(owner=pool)
    def one():
        return shared

    @top.parameters(owner=pool)
    def two():
        return nn.Sequential(shared)

    with pytest.raises(ConfigError, match=r"'two.0.weight' and 'one.weight' are one tensor"):
        made.initial(top)


def test_module_of_the_file_is_copied_and_stays_as_it_was() -> None:
    shared = nn.Linear(2, 2)
    before = shared.weight.detach().clone()
    top = calling(weights=lambda: shared)
    found = made.modules(top, made.everywhere(top))

    made.fill(found, {f"weights.{k}": torch.zeros_like(v) for k, v in shared.state_dict().items()})

    assert torch.equal(shared.weight, before)


def test_trace_says_shapes_by_item_and_crosses_to_other_processes() -> None:
    trace = traced(pool_topologies.produced_by_item())

    assert trace.values["seen"].axis == "part"
    assert trace.values["seen"].shapes == {"p": (2,), "q": (2,), "r": (2,)}
    assert type(trace).from_json(trace.to_json()) == trace
    assert traced(pool_topologies.global_sums()).through == ("entropy", "balance")


def test_part_leaves_state_alone_that_a_term_changes_in_place() -> None:
    def moved(value, kept, rows):
        kept.value.add_(1.0)
        return Counted(value.sum() + kept.value.sum(), len(rows["x"]), "rows")

    top = calling(term=moved)
    reference = Reference(top, made.initial(top))
    reference.step(0)

    reference.part(0, Span(0, 3))

    assert torch.equal(reference.boxes["kept"].value, torch.ones(6))
