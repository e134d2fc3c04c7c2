"""Units of a queue: no row is in none, none in two, and no unit is empty."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ledger import units
from atoll.ledger.units import Cut

lengths = st.integers(1, 3000)


@given(length=lengths, wanted=st.integers(1, 5000), epoch=st.integers(0, 3))
def test_units_follow_one_another_and_cover_the_epoch(length, wanted, epoch):
    cut = Cut(epoch * length, length, units.units_of(length, wanted), 0)

    spans = [cut.span(unit) for unit in range(cut.units)]

    assert (spans[0][0], spans[-1][1]) == (epoch * length, (epoch + 1) * length)
    assert all(start < stop for start, stop in spans)
    assert all(one[1] == other[0] for one, other in pairwise(spans))


@given(length=lengths, wanted=st.integers(1, 5000), data=st.data())
def test_unit_of_a_position_is_the_one_that_covers_it(length, wanted, data):
    cut = Cut(2 * length, length, units.units_of(length, wanted), 0)
    position = 2 * length + data.draw(st.integers(0, length - 1))

    start, stop = cut.span(cut.unit(position))

    assert start <= position < stop


def test_units_are_cut_by_the_formula():
    cut = Cut(0, 10, 4, 0)

    assert [cut.span(unit) for unit in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_units_of_a_stream_have_a_fixed_number_of_rows():
    cut = Cut(0, 0, 0, 8)

    assert (cut.unit(7), cut.unit(8), cut.span(5)) == (0, 1, (40, 48))


def test_touched_units_are_those_that_hold_a_row():
    cut = Cut(10, 10, 5, 0)

    assert list(cut.touched(11, 15)) == [0, 1, 2]
    assert list(cut.touched(12, 14)) == [1]


@given(sets=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 9)), max_size=6))
def test_bitmap_holds_what_was_set_and_counts_it(sets):
    bitmap, expected = bytes(10), set()
    for first, count in sets:
        bitmap = units.with_bits(bitmap, range(first, first + count))
        expected |= set(range(first, first + count))

    number = int.from_bytes(bitmap, "little")
    assert {unit for unit in range(90) if number >> unit & 1} == expected
    assert units.count_bits(bitmap) == len(expected)
    assert units.last_bit(bitmap) == max(expected, default=-1)


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 1), (8, 1), (9, 2)])
def test_bitmap_has_a_byte_for_eight_units(count, size):
    assert units.bitmap_bytes(count) == size
