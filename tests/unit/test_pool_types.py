"""Partial, Replicated, Total and Mean: what may be added, reduced and divided, and what may not."""

from collections.abc import Callable
from functools import partial as bound
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.collectives.base import Collectives
from atoll.errors import EmptySum, ProtocolError
from atoll.layout import Span
from atoll.pools.provenance import Provenance, Told
from atoll.pools.types import Mean, Partial, Replicated, Total, once, reduce
from atoll.sums.partial import PartialSum
from tests.rank_groups import key, threads

ranks_of = bound(threads, is_inline=True)
X = torch.arange(6, dtype=torch.float64).view(2, 3)


def part(
    rows: Any = (0,), *, total: Any = X, count: int = 3, unit: str = "tokens", **of: Any
) -> Partial:
    about = {"rank": 0, "step": 1, "rows": rows, **of}
    return Partial(total, count, unit, (Provenance.of(about.pop("term", "fit"), **about),))


# What is covered


def test_parts_with_rows_apart_add_up_to_one_that_covers_both():
    found = part(range(4)) + part(range(4, 7), count=5) + part([9], rank=1, count=1)

    assert torch.equal(found.total, 3 * X)
    assert (found.count, found.unit, found.term, found.step) == (9, "tokens", "fit", 1)
    assert [(one.rank, one.rows) for one in found.coverage] == [
        (0, (Span(0, 7),)),
        (1, (Span(9, 10),)),
    ]


def test_parts_of_the_same_rows_add_up_where_their_items_are_apart():
    found = part(range(4), items=["a"]) + part(range(4), items=["c", "b"], rank=1)

    assert [one.items for one in found.coverage] == [("a",), ("b", "c")]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (part(range(3, 5), rank=2), "covers row 3, which rank 0 covers too"),
        (part(None, rank=2), "covers row 0, which rank 0 covers too"),
        (part([7, 2], items=["b"]), "covers row 2 of item 'b', which rank 0"),
        (part([9], step=2), "in step 2 meets 'fit' on rank 0 in step 1; a sum is of one term"),
        (part([9], term="decay"), "'decay' on rank 0 in step 1 meets 'fit'"),
        (part([9], unit="rows"), "a sum over 'tokens' meets one over 'rows'"),
        (part([9], total=X.float()), "all terms of a sum must be alike"),
    ],
    ids=["rows", "all rows", "item", "step", "term", "unit", "dtype"],
)
def test_parts_that_overlap_or_differ_are_not_added(other, told):
    one = part(range(4))

    with pytest.raises(ProtocolError, match=told):
        one + other
    assert one.count == 3


@given(st.lists(st.sets(st.integers(0, 12)), min_size=2, max_size=4), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_parts_are_added_exactly_where_no_row_comes_twice(sets, turned):
    parts = [part(rows, rank=k, count=len(rows)) for k, rows in enumerate(sets)]
    is_apart = sum(map(len, sets)) == len(set().union(*sets))

    try:
        first, *rest = reversed(parts) if turned else parts
        for one in rest:
            first = first + one
    except ProtocolError:
        assert not is_apart
    else:
        assert is_apart
        covered = [r for one in first.coverage for s in one.rows or () for r in range(*_ends(s))]
        assert sorted(covered) == sorted(set().union(*sets))
        assert first.count == len(covered)


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop


def test_nothing_is_apart_from_everything():
    everything = part(None)

    assert (everything + part((), count=0)).coverage == everything.coverage
    with pytest.raises(ProtocolError, match="covers all of it, which rank 0 covers too"):
        everything + part(None, rank=1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Partial(X, 1, "tokens", ()), "covers nothing"),
        (lambda: part((), count=1), "count=1 of 'tokens' comes from no row"),
        (lambda: part([1], count=-1), "count=-1 must be an integer"),
        (lambda: part([1], count=1.0), "count=1.0 must be an integer"),  # type: ignore[arg-type]
        (lambda: part([1, 2, 1]), "row 1 is given twice"),
        (lambda: part([1], items=["a", "a"]), "name one twice"),
        (lambda: part([1], term=""), "name its term"),
        (lambda: part([1], rank=-1), "rank=-1"),
        (lambda: part([1], total=[1.0]), "of type list is none"),
    ],
)
def test_parts_that_cannot_be_are_refused_where_they_are_made(make, told):
    with pytest.raises(ProtocolError, match=told):
        make()


# What is never summed


MEAN = Mean(X, "tokens")
TOTAL = Total(X, 3, "tokens", ())
ALIKE = Replicated(X, 6, "weights", Provenance.of("decay", rank=0, step=1))
WRONG = {
    "Mean": MEAN,
    "Total": TOTAL,
    "Replicated": ALIKE,
    "PartialSum": PartialSum(X, 3, "tokens"),
}
USES: dict[str, Callable[[Any, Any], object]] = {
    "added": lambda wrong, _: part() + wrong,
    "added to": lambda wrong, _: wrong + part(),
    "put in": lambda wrong, _: part(total=wrong),
    "reduced": lambda wrong, group: reduce(wrong, group, key(1)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("use", USES)
def test_only_a_partial_is_summed(name, use):
    def work(group: Collectives) -> str:
        with pytest.raises(ProtocolError) as refused:
            USES[use](WRONG[name], group)
        return str(refused.value)

    [told] = ranks_of(1, "ring", work)

    assert told.startswith(f"a {name} is ")


@pytest.mark.parametrize("wrong", [part(), TOTAL, MEAN])
def test_only_what_all_have_alike_enters_once(wrong):
    def work(group: Collectives) -> None:
        with pytest.raises(ProtocolError, match="`once` takes a Replicated"):
            once(wrong, group)

    ranks_of(1, "ring", work)


def test_numbers_are_not_added_to_a_mean():
    numbers: Any = [MEAN]

    with pytest.raises(ProtocolError, match="a mean is the end of a sum"):
        sum(numbers)


def test_replicated_and_totals_hold_tensors():
    wrong: Any = MEAN

    with pytest.raises(ProtocolError, match="a Mean is put into a sum"):
        Replicated(wrong, 6, "weights", ALIKE.provenance)


def test_partial_is_not_divided():
    with pytest.raises(ProtocolError, match="reduce it, and take the mean of the total"):
        part().mean()


# Reductions


def values(rank: int) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_total_is_the_sum_of_values_and_of_integer_counts(size, is_checked):
    counts = [2**60 + 1, 0, 5, 7, 1][:size]

    def work(group: Collectives) -> Total:
        rank = group.rank
        own = part(range(2 * rank, 2 * rank + 2), total=values(rank), count=counts[rank], rank=rank)
        found = reduce(own, group, key(1), is_checked=is_checked)
        assert torch.equal(own.total, values(rank))
        return found

    found = ranks_of(size, "ring", work)

    right = torch.stack([values(k) for k in range(size)]).sum(0)
    for one in found:
        torch.testing.assert_close(one.total, right, rtol=0, atol=1e-14)
        assert torch.equal(one.total, found[0].total)
        assert (one.count, one.unit) == (sum(counts), "tokens")  # an fp64 sum would lose the 1
        assert len(one.coverage) == (size if is_checked else 0)


def test_mean_of_a_total_is_over_the_count_of_all_ranks():
    """The control: a mean of the ranks' means weighs uneven ranks alike."""
    counts = (6, 2)

    def work(group: Collectives) -> Tensor:
        count = counts[group.rank]
        total = torch.full((1,), float(group.rank * count), dtype=torch.float64)
        return reduce(part([group.rank], total=total, count=count), group, key(1)).mean().value

    assert [float(one) for one in ranks_of(2, "ring", work)] == [0.25, 0.25]
    assert sum(range(2)) / 2 != 0.25


def test_total_of_nothing_has_no_mean():
    def work(group: Collectives) -> None:
        total = reduce(part((), count=0), group, key(1))
        with pytest.raises(EmptySum, match="no tokens arrived"):
            total.mean()

    ranks_of(2, "ring", work)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_all_have_alike_enters_a_total_once(size):
    def work(group: Collectives) -> tuple[Total, Partial]:
        own = Replicated(X, 6, "weights", Provenance.of("decay", rank=group.rank, step=1))
        entered = once(own, group)
        return reduce(entered, group, key(1)), entered

    for rank, (total, entered) in enumerate(ranks_of(size, "ring", work)):
        assert torch.equal(total.total, X)
        assert total.count == 6
        assert bool(entered.total.any()) == (rank == 0)
        assert entered.count == (6 if rank == 0 else 0)


def test_what_all_have_alike_is_refused_where_all_contribute_it():
    """The control: the coverage shows what `once` is for."""

    def work(group: Collectives) -> str:
        own = Partial(X, 6, "weights", (Provenance.of("decay", rank=group.rank, step=1),))
        with pytest.raises(ProtocolError) as refused:
            reduce(own, group, key(1))
        return str(refused.value)

    told = ranks_of(2, "ring", work)

    assert told[0] == told[1]
    assert "'decay' on rank 1 in step 1 covers all of it, which rank 0 covers too" in told[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": [1]}, "covers row 1, which rank 0 covers too"),
        ({"unit": "rows"}, "rank 1 has a sum over 'rows'"),
        ({"total": X.float()}, "of shape [2, 3] and torch.float32, rank 0 one over 'tokens'"),
        ({"total": X.view(3, 2)}, "of shape [3, 2] and torch.float64"),
        ({"term": "decay"}, "'decay' on rank 1 in step 1 meets 'fit' on rank 0"),
        ({"step": 2}, "in step 2 meets 'fit' on rank 0 in step 1"),
    ],
    ids=["rows", "unit", "dtype", "shape", "term", "step"],
)
def test_ranks_whose_parts_do_not_fit_are_told_alike_and_nothing_is_summed(change, told):
    def work(group: Collectives) -> tuple[str, int]:
        about: dict[str, Any] = (
            {"rows": [5], "rank": 1, **change} if group.rank == 1 else {"rows": [0, 1]}
        )
        before = part(**about)
        with pytest.raises(ProtocolError) as refused:
            reduce(before, group, key(1))
        counted: Any = group
        return str(refused.value), counted.traffic.sent

    (first, _), (second, sent) = ranks_of(2, "ring", work)

    assert first == second
    assert told in first
    assert sent < 400  # words, and no values


def test_reduction_under_the_key_of_its_words_is_refused():
    def work(group: Collectives) -> None:
        with pytest.raises(ProtocolError, match="give another op"):
            reduce(part(), group, key(1, op="control"))

    ranks_of(1, "ring", work)


@pytest.mark.parametrize("word", [b"", b"{}", b'{"unit":"tokens"}', b"[1]", b"\xff"])
def test_word_that_is_none_is_refused(word):
    class Said:
        rank, size = 0, 1

        def all_gather_bytes(self, *_: object, limit: int) -> list[bytes]:
            assert limit == 64 << 10
            return [word]

    group: Any = Said()

    with pytest.raises(ProtocolError, match="rank 0 says"):
        reduce(part(), group, key(1))


@pytest.mark.parametrize("rows", [[(3, 3)], [(-1, 2)], [(0, 4), (3, 6)]])
def test_rows_that_no_rank_tells_are_refused(rows):
    with pytest.raises(ProtocolError, match="are no span"):
        Told(term="fit", rank=0, step=1, rows=rows, items=None).provenance()


def test_provenance_travels_whole():
    one = Provenance.of("fit", rank=3, step=7, rows=[1, 2, 9], items=["b", "a"])

    assert Told.model_validate_json(Told.of(one).model_dump_json()).provenance() == one
