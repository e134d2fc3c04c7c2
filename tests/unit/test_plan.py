from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import plan
from atoll.data.plan import Plan, Source
from atoll.errors import ConfigError, StateDamaged
from atoll.rows import RowRange

worker_lists = st.lists(st.sampled_from(["a", "b", "B", "a.1", "a-1", "10", "9"]), unique=True)
weights = st.integers(1, 7)
lengths = st.sampled_from([0, 1, 2, 7, 50, 1000])


@st.composite
def states(draw):
    """Sources, and disjoint reopened ranges before their cursors in any order."""
    sources, reopened = [], []
    for name in draw(st.lists(st.sampled_from("xyz"), min_size=1, unique=True)):
        edges = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
        reopened += [RowRange(name, a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        cursor = (edges[-1] if edges else 0) + draw(st.integers(0, 20))
        sources.append(Source(name, draw(lengths), draw(weights), cursor))
    return sources, draw(st.permutations(reopened))


def positions(ranges):
    return [(r.dataset_id, p) for r in ranges for p in range(r.start, r.stop)]


def planned(result):
    return positions(chain.from_iterable(result.ranges.values()))


def one(cursor: int, length: int = 1000) -> list[Source]:
    return [Source("x", length, 1, cursor)]


def x(start: int, stop: int) -> RowRange:
    return RowRange("x", start, stop)


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_plan_gives_every_worker_exactly_its_rows(workers, rows_each, state):
    sources, reopened = state

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)

    assert {w: len(positions(r)) for w, r in result.ranges.items()} == dict.fromkeys(
        workers, rows_each
    )


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_plan_gives_no_row_twice(workers, rows_each, state):
    sources, reopened = state

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)

    assert len(set(planned(result))) == len(planned(result))


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_plan_loses_no_row(workers, rows_each, state):
    sources, reopened = state

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)

    untouched = set(reopened) - set(result.taken)
    fresh = [
        (s.dataset_id, p) for s in sources for p in range(s.cursor, result.cursors[s.dataset_id])
    ]
    after = planned(result) + positions(result.left) + positions(untouched)
    assert sorted(after) == sorted(positions(reopened) + fresh)


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_plan_takes_only_ranges_it_uses(workers, rows_each, state):
    sources, reopened = state

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)

    assert set(result.taken) <= set(reopened)
    assert all(set(positions([r])) & set(planned(result)) for r in result.taken)


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_plan_gives_fresh_rows_only_when_no_reopened_one_waits(workers, rows_each, state):
    sources, reopened = state

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)

    has_left = bool(result.left) or set(result.taken) != set(reopened)
    assert result.cursors == {s.dataset_id: s.cursor for s in sources} or not has_left


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states())
def test_every_range_lies_in_one_epoch(workers, rows_each, state):
    sources, _ = state
    length = {s.dataset_id: s.length for s in sources}

    result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=[])

    finite = [r for r in chain.from_iterable(result.ranges.values()) if length[r.dataset_id]]
    assert all(
        r.start // length[r.dataset_id] == (r.stop - 1) // length[r.dataset_id] for r in finite
    )


@given(workers=worker_lists, rows_each=st.integers(1, 40), state=states(), data=st.data())
def test_plan_does_not_depend_on_the_order_of_its_arguments(workers, rows_each, state, data):
    sources, reopened = state
    workers_again = data.draw(st.permutations(workers))
    reopened_again = data.draw(st.permutations(reopened))

    first = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)
    again = plan.plan(
        dict.fromkeys(workers_again, rows_each), sources=sources, reopened=reopened_again
    )

    assert first == again
    assert list(first.ranges) == list(again.ranges)


@given(
    shares=st.lists(st.tuples(weights, lengths), min_size=1, max_size=4),
    rows=st.lists(st.integers(1, 500), max_size=20),
)
def test_rows_follow_the_weights_to_less_than_a_row_and_a_source(shares, rows):
    """Whatever the sizes of the rounds: counted in deficits, which are exact."""
    sources = [Source(str(n), length, weight, 0) for n, (weight, length) in enumerate(shares)]
    given_out = dict.fromkeys((s.dataset_id for s in sources), 0)
    whole = sum(s.weight for s in sources)

    for count in rows:
        for source, more in zip(sources, plan.shares(sources, given_out, count), strict=True):
            given_out[source.dataset_id] += more

        total = sum(given_out.values())
        assert all(
            abs(s.weight * total - whole * given_out[s.dataset_id]) <= whole * len(sources)
            for s in sources
        )
    assert sum(given_out.values()) == sum(rows)


@st.composite
def histories(draw):
    """Rounds: who is planned, and whose contribution is lost."""
    rounds = []
    for _ in range(draw(st.integers(1, 12))):
        workers = draw(worker_lists.filter(bool))
        rounds.append((workers, draw(st.sets(st.sampled_from(workers)))))
    return rounds


@given(history=histories(), rows_each=st.integers(1, 30), data=st.data())
def test_every_row_of_every_epoch_is_done_exactly_once_in_any_history(history, rows_each, data):
    """Losses are planned again until nothing is open before the cursors."""
    names = data.draw(st.lists(st.sampled_from("xyz"), min_size=1, unique=True))
    shapes = {name: (data.draw(lengths), data.draw(weights)) for name in names}
    cursors = dict.fromkeys(names, 0)
    reopened: list[RowRange] = []
    done: list[RowRange] = []

    for workers, lost in [*history, *[(["z"], set())] * 400]:
        if not reopened and (workers, lost) == (["z"], set()):
            break
        sources = [Source(name, *shapes[name], cursors[name]) for name in names]
        result = plan.plan(dict.fromkeys(workers, rows_each), sources=sources, reopened=reopened)
        cursors = result.cursors
        reopened = [r for r in reopened if r not in result.taken] + list(result.left)
        for worker, ranges in result.ranges.items():
            (reopened if worker in lost else done).extend(ranges)

    everything = [(name, p) for name in names for p in range(cursors[name])]
    assert sorted(positions(done)) == sorted(everything)


def test_plan_serves_workers_in_worker_id_order():
    result = plan.plan({"b": 4, "a": 4}, sources=one(8), reopened=[])

    assert result.ranges == {"a": (x(8, 12),), "b": (x(12, 16),)}
    assert list(result.ranges) == ["a", "b"]


def test_plan_gives_reopened_rows_first_and_oldest_first():
    result = plan.plan({"a": 4, "b": 4, "c": 4}, sources=one(8), reopened=[x(4, 8), x(0, 4)])

    assert result.ranges == {"a": (x(0, 4),), "b": (x(4, 8),), "c": (x(8, 12),)}


def test_plan_splits_a_reopened_range_and_names_what_is_left():
    result = plan.plan({"a": 3, "b": 3}, sources=one(20), reopened=[x(0, 2), x(5, 15)])

    assert result.ranges == {"a": (x(0, 2), x(5, 6)), "b": (x(6, 9),)}
    assert result.taken == (x(0, 2), x(5, 15))
    assert result.left == (x(9, 15),)
    assert result.cursors == {"x": 20}


def test_plan_leaves_untouched_ranges_out_of_taken_and_left():
    result = plan.plan({"a": 2}, sources=one(9), reopened=[x(0, 2), x(5, 7)])

    assert (result.taken, result.left) == ((x(0, 2),), ())


def test_plan_spans_the_end_of_an_epoch_with_two_ranges():
    result = plan.plan({"a": 6}, sources=one(8, length=10), reopened=[])

    assert result.ranges == {"a": (x(8, 10), x(10, 14))}


def test_plan_takes_from_each_source_by_its_weight():
    sources = [Source("x", 100, 3, 0), Source("y", 0, 1, 0)]

    result = plan.plan({"a": 6, "b": 6}, sources=sources, reopened=[])

    assert result.ranges == {
        "a": (x(0, 5), RowRange("y", 0, 1)),
        "b": (x(5, 9), RowRange("y", 1, 3)),
    }


def test_plan_leaves_ranges_of_other_datasets_alone():
    stale = RowRange("gone", 0, 50)

    result = plan.plan({"a": 4}, sources=one(8), reopened=[stale])

    assert result == Plan({"a": (x(8, 12),)}, {"x": 12}, (), ())


def test_plan_without_workers_changes_nothing():
    result = plan.plan({}, sources=one(8), reopened=[x(0, 4)])

    assert result == Plan({}, {"x": 8}, (), ())


def test_plan_gives_each_worker_as_many_rows_as_are_wanted_for_it():
    result = plan.plan({"b": 5, "a": 2}, sources=one(8), reopened=[x(0, 3)])

    assert result.ranges == {"a": (x(0, 2),), "b": (x(2, 3), x(8, 12))}


def test_plan_refuses_less_than_one_row_each():
    with pytest.raises(ConfigError, match="0 rows for worker_id 'b'"):
        plan.plan({"a": 4, "b": 0}, sources=one(0), reopened=[])


def test_plan_refuses_reopened_ranges_that_overlap():
    with pytest.raises(StateDamaged, match=r"\[0, 5\) reach past the next range at 4"):
        plan.plan({"a": 1}, sources=one(9), reopened=[x(4, 6), x(0, 5)])


def test_plan_refuses_a_reopened_range_beyond_the_cursor():
    with pytest.raises(StateDamaged, match="the cursor at 5"):
        plan.plan({"a": 1}, sources=one(5), reopened=[x(4, 6)])


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_range_refuses_to_hold_no_row(start, stop):
    with pytest.raises(StateDamaged, match="hold no row"):
        RowRange("x", start, stop)


@pytest.mark.parametrize(
    ("sources", "rows_each"),
    [
        ([Source("x", 2, 1, 0)], 2 * plan.MAX_EPOCHS),
        ([Source("x", 0, 1, 0)], 10**9),
        ([Source("x", 2, 1, 0), Source("y", 10**6, 3, 0)], 8 * plan.MAX_EPOCHS),
    ],
    ids=["one", "stream", "a quarter of the rows"],
)
def test_round_of_as_many_epochs_as_a_frame_can_name_is_planned(sources, rows_each):
    plan.check_epochs(sources, rows_each=rows_each)


@pytest.mark.parametrize(
    ("sources", "rows_each"),
    [
        ([Source("x", 2, 1, 0)], 2 * plan.MAX_EPOCHS + 2),
        ([Source("x", 2, 1, 0), Source("y", 2, 1, 0)], 2 * plan.MAX_EPOCHS + 4),
    ],
    ids=["one", "two together"],
)
def test_round_of_more_epochs_than_a_frame_can_name_is_refused(sources, rows_each):
    with pytest.raises(ConfigError, match=r"epochs of a dataset of 2 rows; .* lower sync_every"):
        plan.check_epochs(sources, rows_each=rows_each)
