"""Every element that a rank holds is read once, from the old rank that held it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.layout import Span
from atoll.strategies.sharded import reshard
from atoll.strategies.sharded.holding import SECTIONS, Holding, holdings

sizes = st.integers(1, 7)
unit_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def units_of(lengths):
    """Units one after another in a flat layout."""
    found, start = [], 0
    for length in lengths:
        found.append(Span(start, start + length))
        start += length
    return tuple(found)


def section(whole, holding):
    """What the holding's section is of a whole model, by the definition of its spans."""
    return torch.cat([span.of(whole) for span in holding.spans])


def resharded(wholes, new, old_size):
    """The new rank's sections, put together from the saves of the old ranks."""
    olds = holdings(new.units, old_size)
    saved = [torch.cat([section(whole, old) for whole in wholes]) for old in olds]
    made = [torch.full((new.elements,), -1.0) for _ in SECTIONS]
    counts = [torch.zeros(new.elements, dtype=torch.int64) for _ in SECTIONS]
    for read in reshard.reads(new, old_size):
        start, stop = (b // 4 for b in read.byte_range(olds[read.part]))
        made[read.section][read.place : read.place + len(read)] = saved[read.part][start:stop]
        counts[read.section][read.place : read.place + len(read)] += 1
    return made, counts


@given(unit_sizes, sizes)
def test_holdings_cover_every_element_once(lengths, size):
    units = units_of(lengths)
    seen = torch.zeros(units[-1].stop, dtype=torch.int64)

    for holding in holdings(units, size):
        for span in holding.spans:
            span.of(seen).add_(1)

    assert bool((seen == 1).all())


@given(unit_sizes, sizes, sizes)
def test_resharded_sections_are_those_of_the_new_cut(lengths, old_size, new_size):
    units = units_of(lengths)
    wholes = [torch.arange(units[-1].stop, dtype=torch.float32) + 1000 * s for s in range(3)]

    for new in holdings(units, new_size):
        made, counts = resharded(wholes, new, old_size)

        assert all(bool((count == 1).all()) for count in counts)
        assert all(
            torch.equal(found, section(whole, new))
            for found, whole in zip(made, wholes, strict=True)
        )


def test_equal_cut_is_one_read_of_each_section():
    new = Holding(units_of([10, 20, 30]), 4, 1)

    found = reshard.reads(new, 4, holders=[(0,), (1, 2), (2,), (3,)])

    assert [(r.section, r.part, r.holder, len(r)) for r in found] == [
        (s, 1, 1, new.elements) for s in range(3)
    ]


def test_part_is_read_from_its_holders_in_turn_and_from_oneself_first():
    units = units_of([12])

    found = {
        new.rank: {r.part: r.holder for r in reshard.reads(new, 1, holders=[(1, 2)])}
        for new in holdings(units, 4)
    }

    assert found == {0: {0: 1}, 1: {0: 1}, 2: {0: 2}, 3: {0: 2}}


def test_part_that_nobody_holds_is_refused_by_its_number():
    with pytest.raises(ConfigError, match="part 1"):
        reshard.reads(Holding(units_of([12]), 2, 1), 2, holders=[(0,), ()])


def test_part_that_is_not_needed_needs_no_holder():
    found = reshard.reads(Holding(units_of([12]), 2, 0), 2, holders=[(0,), ()])

    assert {r.part for r in found} == {0}
