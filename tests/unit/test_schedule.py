"""The schedules, played out on paper: every part is added up whole, in order, and goes to all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import schedule
from atoll.errors import ConfigError
from atoll.layout import Span

sizes = st.integers(1, 40)


@given(st.integers(0, 10_000), sizes)
def test_parts_follow_one_another_and_differ_by_one_element_at_most(elements, size):
    parts = schedule.cut(elements, size)

    assert [parts[0].start, *(part.stop for part in parts)] == [
        *(part.start for part in parts),
        elements,
    ]
    assert len(parts) == size
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("elements", "size"), [(-1, 2), (3, 0)])
def test_what_cannot_be_cut_is_refused(elements, size):
    with pytest.raises(ConfigError, match=f"elements={elements}"):
        schedule.cut(elements, size)


@given(sizes)
def test_ring_adds_each_part_in_the_canonical_order(size):
    """Each rank holds, for each part, the ranks whose values are in its partial sum."""
    sums = [[[rank] for _ in range(size)] for rank in range(size)]
    for turn in range(size - 1):
        hops = [schedule.ring_reduce(rank, size)[turn] for rank in range(size)]
        sent = [sums[rank][hop.sends] for rank, hop in enumerate(hops)]
        for rank, hop in enumerate(hops):
            before, _ = schedule.neighbours(rank, size)
            assert hops[before].sends == hop.receives
            sums[rank][hop.receives] = sent[before] + [rank]

    assert [sums[k][k] for k in range(size)] == [schedule.order(k, size) for k in range(size)]


@given(sizes)
def test_ring_brings_each_part_to_everybody(size):
    held = [{rank} for rank in range(size)]
    for turn in range(size - 1):
        hops = [schedule.ring_gather(rank, size)[turn] for rank in range(size)]
        for rank, hop in enumerate(hops):
            assert hop.sends in held[rank]
        for rank, hop in enumerate(hops):
            before, after = schedule.neighbours(rank, size)
            assert hops[before].sends == hop.receives
            assert schedule.neighbours(after, size)[0] == rank
            held[rank] = held[rank] | {hop.receives}

    assert held == [set(range(size))] * size


@given(sizes)
def test_everybody_else_is_sent_to_once_and_not_all_begin_with_the_same(size):
    firsts = [schedule.others(rank, size)[0] for rank in range(size) if size > 1]

    for rank in range(size):
        assert sorted([rank, *schedule.others(rank, size)]) == list(range(size))
    assert len(set(firsts)) == len(firsts)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_chunks_cover_a_span(start, length, elements):
    span = Span(start, start + length)

    found = list(schedule.chunks(span, elements))

    assert [k for chunk in found for k in range(chunk.start, chunk.stop)] == list(
        range(span.start, span.stop)
    )
    assert all(0 < len(chunk) <= elements for chunk in found)
