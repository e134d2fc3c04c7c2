from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import plan
from atoll.data.plan import Range
from atoll.errors import ConfigError, StateDamaged

worker_lists = st.lists(st.sampled_from(["a", "b", "B", "a.1", "a-1", "10", "9"]), unique=True)


@st.composite
def reopened_lists(draw):
    """Disjoint ranges in any order and a cursor at or after their end."""
    edges = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
    ranges = [Range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    cursor = (edges[-1] if edges else 0) + draw(st.integers(0, 20))
    return draw(st.permutations(ranges)), cursor


def positions(ranges):
    return [p for r in ranges for p in range(r.start, r.stop)]


def planned(result):
    return positions(chain.from_iterable(result.ranges.values()))


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists())
def test_plan_gives_every_worker_exactly_its_rows(workers, rows_each, state):
    reopened, cursor = state

    result = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)

    assert {w: len(positions(r)) for w, r in result.ranges.items()} == dict.fromkeys(
        workers, rows_each
    )


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists())
def test_plan_gives_no_row_twice(workers, rows_each, state):
    reopened, cursor = state

    result = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)

    assert len(set(planned(result))) == len(planned(result))


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists())
def test_plan_loses_no_row(workers, rows_each, state):
    reopened, cursor = state

    result = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)

    untouched = set(reopened) - set(result.taken)
    open_before = positions(reopened) + list(range(cursor, result.cursor))
    after = planned(result) + positions(result.left) + positions(untouched)
    assert sorted(after) == sorted(open_before)


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists())
def test_plan_takes_only_ranges_it_uses(workers, rows_each, state):
    reopened, cursor = state

    result = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)

    assert set(result.taken) <= set(reopened)
    assert all(set(positions([r])) & set(planned(result)) for r in result.taken)


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists())
def test_plan_gives_fresh_rows_only_when_no_reopened_one_waits(workers, rows_each, state):
    reopened, cursor = state

    result = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)

    has_left = bool(result.left) or set(result.taken) != set(reopened)
    assert result.cursor == cursor or not has_left


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=reopened_lists(), data=st.data())
def test_plan_does_not_depend_on_the_order_of_its_arguments(workers, rows_each, state, data):
    reopened, cursor = state
    workers_again = data.draw(st.permutations(workers))
    reopened_again = data.draw(st.permutations(reopened))

    first = plan.plan(workers, rows_each=rows_each, cursor=cursor, reopened=reopened)
    again = plan.plan(workers_again, rows_each=rows_each, cursor=cursor, reopened=reopened_again)

    assert first == again
    assert list(first.ranges) == list(again.ranges)


def test_plan_serves_workers_in_worker_id_order():
    result = plan.plan(["b", "a"], rows_each=4, cursor=8, reopened=[])

    assert result.ranges == {"a": (Range(8, 12),), "b": (Range(12, 16),)}
    assert list(result.ranges) == ["a", "b"]


def test_plan_gives_reopened_rows_first_and_oldest_first():
    reopened = [Range(4, 8), Range(0, 4)]

    result = plan.plan(["a", "b", "c"], rows_each=4, cursor=8, reopened=reopened)

    assert result.ranges == {"a": (Range(0, 4),), "b": (Range(4, 8),), "c": (Range(8, 12),)}


def test_plan_splits_a_reopened_range_and_names_what_is_left():
    result = plan.plan(["a", "b"], rows_each=3, cursor=20, reopened=[Range(0, 2), Range(5, 15)])

    assert result.ranges == {"a": (Range(0, 2), Range(5, 6)), "b": (Range(6, 9),)}
    assert result.taken == (Range(0, 2), Range(5, 15))
    assert result.left == (Range(9, 15),)
    assert result.cursor == 20


def test_plan_leaves_untouched_ranges_out_of_taken_and_left():
    result = plan.plan(["a"], rows_each=2, cursor=9, reopened=[Range(0, 2), Range(5, 7)])

    assert (result.taken, result.left) == ((Range(0, 2),), ())


def test_plan_without_workers_changes_nothing():
    result = plan.plan([], rows_each=4, cursor=8, reopened=[Range(0, 4)])

    assert result == plan.Plan({}, 8, (), ())


def test_plan_refuses_a_worker_given_twice():
    with pytest.raises(ConfigError, match="'a' is planned twice"):
        plan.plan(["a", "b", "a"], rows_each=4, cursor=0, reopened=[])


def test_plan_refuses_less_than_one_row_each():
    with pytest.raises(ConfigError, match="rows_each=0"):
        plan.plan(["a"], rows_each=0, cursor=0, reopened=[])


def test_plan_refuses_reopened_ranges_that_overlap():
    with pytest.raises(StateDamaged, match=r"\[0, 5\) reach past the next range at 4"):
        plan.plan(["a"], rows_each=1, cursor=9, reopened=[Range(4, 6), Range(0, 5)])


def test_plan_refuses_a_reopened_range_beyond_the_cursor():
    with pytest.raises(StateDamaged, match="the cursor at 5"):
        plan.plan(["a"], rows_each=1, cursor=5, reopened=[Range(4, 6)])


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_range_refuses_to_hold_no_row(start, stop):
    with pytest.raises(StateDamaged, match="hold no row"):
        Range(start, stop)
