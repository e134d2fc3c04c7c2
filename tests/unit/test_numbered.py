"""Rows of a round by their numbers, against the order in which they are trained."""

import itertools

import pytest

from atoll.data import batches, mixture, numbered
from atoll.data.base import dataset_id
from atoll.data.mixture import Mixture, NamedDataset
from atoll.data.synthetic import SyntheticCorpus
from atoll.layout import Span
from atoll.rows import RowRange

MIXED = Mixture(
    [
        NamedDataset(name, weight, SyntheticCorpus(seed=seed, rows=40, held_out_rows=2, block=4))
        for name, weight, seed in (("x", 3, 1), ("y", 1, 2))
    ]
)
X, Y = (dataset_id(one.dataset.identity()) for one in MIXED.named)
ONE = [RowRange("d", 3, 8), RowRange("d", 20, 31), RowRange("d", 31, 35)]
SEVERAL = sorted([RowRange(X, 4, 16), RowRange(X, 30, 36), RowRange(Y, 10, 16)])
SPANS = [[(0, 1)], [(4, 6), (9, 20)], [(0, 20)], [(3, 3)], [], [(17, 24), (2, 5)]]


def by_hand(ranges, spans):
    """Position after position, out of the order that trains them."""
    one = SyntheticCorpus(seed=1, rows=40, held_out_rows=2, block=4)
    dataset = one if ranges is ONE else MIXED
    names = {id(part): name for name, part in MIXED.parts.items()} | {id(one): "d"}
    order = [(names[id(found)], place) for found, place in mixture.turns(dataset, ranges)]
    return sorted({order[n] for first, last in spans for n in range(first, min(last, len(order)))})


@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("ranges", [ONE, SEVERAL], ids=["one dataset", "a mixture"])
def test_picked_rows_are_those_that_are_trained_under_their_numbers(ranges, spans):
    found = numbered.picked(ranges, [Span(*span) for span in spans])

    places = [(one.dataset_id, place) for one in found for place in range(one.start, one.stop)]
    assert places == by_hand(ranges, spans)
    assert found == numbered.joined(found)


def test_rows_of_a_step_are_those_of_its_batch():
    """What a late rank was given and what is open again are the same rows."""
    seed, batch, step = 5, 6, 2
    given = list(itertools.islice(batches.batches(MIXED, SEVERAL, batch=batch, seed=seed), 4))

    found = numbered.picked(SEVERAL, [Span(step * batch + 2, step * batch + 4)])
    rows = [
        row for one in batches.batches(MIXED, found, batch=1, seed=seed) for row in one.tolist()
    ]

    assert sorted(rows) == sorted(given[step][2:4].tolist())


def test_joined_ranges_cover_each_row_once():
    ranges = [RowRange("b", 0, 5), RowRange("a", 4, 9), RowRange("a", 7, 9), RowRange("a", 9, 12)]

    assert numbered.joined(ranges) == [RowRange("a", 4, 12), RowRange("b", 0, 5)]
    assert numbered.joined([RowRange("a", 0, 2), RowRange("a", 3, 4)]) == [
        RowRange("a", 0, 2),
        RowRange("a", 3, 4),
    ]
