from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll import layout
from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, LEAF_ELEMENTS, Layout, Span

GROUP_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES

# No deadline and no health check of speed: a busy machine must not fail a claim about values.
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 3 * GROUP_ELEMENTS)),
        st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    ),
    min_size=1,
    max_size=6,
)
layouts = shapes.map(lambda dims: Layout.of((f"t{i}", d, "float32") for i, d in enumerate(dims)))
small_layouts = st.lists(
    st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6
).map(lambda dims: Layout.of((f"t{i}", d, "float32") for i, d in enumerate(dims)))


def two() -> Layout:
    return Layout.of([("embed", (4, 3), "float32"), ("head", (5,), "float32")])


# --- placing tensors ---


@quick
@given(layouts)
def test_tensors_follow_one_another_without_a_gap(model):
    stops = [0, *(t.span.stop for t in model.tensors)]

    assert [t.span.start for t in model.tensors] == stops[:-1]


@quick
@given(layouts)
def test_size_is_the_number_of_elements(model):
    assert model.size == sum(prod(t.shape) for t in model.tensors)


def test_nbytes_counts_four_bytes_per_element():
    assert two().nbytes == (4 * 3 + 5) * 4


def test_scalar_takes_one_element():
    model = Layout.of([("scale", (), "float32")])

    assert model.size == 1


def test_layout_keeps_the_order_and_dtype_of_the_tensors_it_is_made_of():
    named = {"b": torch.zeros(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16)}

    model = Layout.of_tensors(named)

    assert model.table() == [["b", "float32", [2, 3]], ["a", "bfloat16", [4]]]


def test_layout_refuses_a_name_that_comes_twice():
    with pytest.raises(LayoutMismatch, match="'embed' is listed twice"):
        Layout.of([("embed", (1,), "float32"), ("embed", (2,), "float32")])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-2,), (-2, -3)])
def test_layout_refuses_a_tensor_without_elements(shape):
    with pytest.raises(LayoutMismatch, match=r"'embed' has shape .* must hold elements"):
        Layout.of([("embed", shape, "float32")])


def test_layout_refuses_a_model_without_parameters():
    with pytest.raises(LayoutMismatch, match="no parameters"):
        Layout.of([])


@quick
@given(layouts, st.data())
def test_name_at_finds_the_tensor_that_holds_an_element(model, data):
    tensor = data.draw(st.sampled_from(model.tensors))
    offset = data.draw(st.integers(tensor.span.start, tensor.span.stop - 1))

    assert model.name_at(offset) == tensor.name


# --- the digest of a layout ---


def test_digest_is_the_same_for_equal_layouts():
    assert two().digest == two().digest


@pytest.mark.parametrize(
    "entries",
    [
        [("embed2", (4, 3), "float32"), ("head", (5,), "float32")],
        [("embed", (3, 4), "float32"), ("head", (5,), "float32")],
        [("embed", (4, 3), "bfloat16"), ("head", (5,), "float32")],
        [("head", (5,), "float32"), ("embed", (4, 3), "float32")],
        [("embed", (4, 3), "float32")],
    ],
    ids=["name", "shape", "dtype", "order", "number"],
)
def test_digest_differs_when_one_thing_differs(entries):
    assert Layout.of(entries).digest != two().digest


# --- tiles ---


@quick
@given(layouts, st.integers(GROUP_BYTES, 8 * GROUP_BYTES))
def test_tiles_cover_the_buffer_exactly_and_in_order(model, budget_bytes):
    tiles = list(model.tiles(budget_bytes))

    edges = [Span(0, 0), *tiles, Span(model.size, model.size)]
    assert all(left.stop == right.start for left, right in pairwise(edges))


@quick
@given(layouts, st.integers(GROUP_BYTES, 8 * GROUP_BYTES))
def test_tiles_fit_their_budget_and_hold_elements(model, budget_bytes):
    sizes = [len(tile) * ELEMENT_BYTES for tile in model.tiles(budget_bytes)]

    assert min(sizes) > 0
    assert max(sizes) <= budget_bytes


@quick
@given(layouts, st.integers(GROUP_BYTES, 8 * GROUP_BYTES))
def test_tiles_are_whole_groups_up_to_the_last(model, budget_bytes):
    tiles = list(model.tiles(budget_bytes))

    assert {len(tile) % GROUP_ELEMENTS for tile in tiles[:-1]} <= {0}
    assert [tile.first_group for tile in tiles] == [t.start // GROUP_ELEMENTS for t in tiles]


@quick
@given(st.integers(1, 20))
def test_tiles_are_as_large_as_the_budget_allows(groups):
    model = Layout.of([("w", (64 * GROUP_ELEMENTS,), "float32")])

    first = next(model.tiles((groups + 1) * GROUP_BYTES - 1))

    assert len(first) == groups * GROUP_ELEMENTS


@pytest.mark.parametrize("budget_bytes", [-1, 0, GROUP_BYTES - 1])
def test_tiles_refuse_a_budget_below_one_group(budget_bytes):
    with pytest.raises(ConfigError, match=f"{budget_bytes} bytes is below one group"):
        list(two().tiles(budget_bytes))


def test_span_refuses_to_name_a_group_it_does_not_start_on():
    with pytest.raises(AssertionError):
        _ = Span(1, GROUP_ELEMENTS).first_group


# --- leaves ---


@quick
@given(layouts)
def test_leaves_cover_the_buffer_exactly_and_in_order(model):
    edges = [Span(0, 0), *model.leaves, Span(model.size, model.size)]

    assert all(left.stop == right.start for left, right in pairwise(edges))


@quick
@given(layouts)
def test_leaves_never_cross_a_tensor(model):
    crossing = [x for x in model.leaves if model.name_at(x.start) != model.name_at(x.stop - 1)]

    assert crossing == []


@quick
@given(layouts)
def test_leaves_hold_between_one_and_the_most_elements(model):
    sizes = {len(leaf) for leaf in model.leaves}

    assert min(sizes) > 0
    assert max(sizes) <= LEAF_ELEMENTS


def test_leaves_cut_a_large_tensor_at_the_most_elements():
    model = Layout.of([("a", (3,), "float32"), ("b", (LEAF_ELEMENTS + 1,), "float32")])

    assert [len(leaf) for leaf in model.leaves] == [3, LEAF_ELEMENTS, 1]


# --- viewing ---


def test_view_writes_through_to_the_buffer():
    flat = two().zeros()

    two().views(flat)["head"].fill_(3.0)

    assert flat.tolist() == [0.0] * 12 + [3.0] * 5


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([("embed", (4, 3), "float32"), ("tail", (5,), "float32")], "tail"),
        ([("embed", (3, 4), "float32"), ("head", (5,), "float32")], "embed"),
        ([("embed", (4, 3), "float32"), ("head", (5,), "float64")], "float64"),
        ([("head", (5,), "float32"), ("embed", (4, 3), "float32")], "head"),
        ([("embed", (4, 3), "float32")], "1 tensors"),
        ([*[(t.name, t.shape, t.dtype) for t in two().tensors], ("x", (), "float32")], "3 tensors"),
    ],
    ids=["name", "shape", "dtype", "order", "missing", "extra"],
)
def test_check_table_names_the_first_difference(entries, told):
    with pytest.raises(LayoutMismatch, match=told):
        two().check_table(Layout.of(entries).table(), subject="the model")


def test_check_table_says_whose_table_differs():
    table = layout.Layout.of([("embed", (4, 3), "float32"), ("head", (6,), "float32")]).table()

    with pytest.raises(LayoutMismatch, match=r"the frame has \['head', 'float32', \[6\]\]"):
        two().check_table(table, subject="the frame")


def test_check_table_passes_the_layouts_own():
    two().check_table(two().table(), subject="the model")


# --- parts: what threads share ---


@quick
@given(layouts, st.integers(1, 9), st.integers(1, 3))
def test_parts_are_whole_tiles_and_follow_one_another(model, count, groups):
    budget = groups * GROUP_BYTES

    parts = model.parts(count, budget)

    assert 1 <= len(parts) <= count
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert [span for part in parts for span in model.tiles(budget, part)] == list(
        model.tiles(budget)
    )


@quick
@given(layouts, st.integers(1, 9))
def test_parts_have_tiles_to_one_the_same_number(model, count):
    sizes = [len(list(model.tiles(GROUP_BYTES, p))) for p in model.parts(count, GROUP_BYTES)]

    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_parts_refuse_a_budget_below_a_group():
    with pytest.raises(ConfigError, match="below one group"):
        two().parts(2, GROUP_BYTES - 1)


# --- fragments: cut and join ---


@st.composite
def cuts(draw, models=layouts):
    """A layout and the names of its fragments, in the layout's order."""
    model = draw(models)
    names = [t.name for t in model.tensors]
    inner = draw(st.sets(st.integers(1, len(names) - 1))) if len(names) > 1 else set()
    return model, [names[a:b] for a, b in pairwise([0, *sorted(inner), len(names)])]


@quick
@given(cuts())
def test_fragments_hold_the_tensors_of_the_layout_they_were_cut_from_in_order(case):
    model, parts = case

    found = [tensor for part in layout.cut(model, parts) for tensor in part.layout.tensors]

    assert Layout.of((t.name, t.shape, t.dtype) for t in found) == model


@quick
@given(cuts())
def test_a_fragment_has_its_tensors_where_the_runs_layout_has_them(case):
    model, parts = case

    fragments = layout.cut(model, parts)

    assert [[t.name for t in f.layout.tensors] for f in fragments] == parts
    assert [f.span.start + t.offset for f in fragments for t in f.layout.tensors] == [
        t.offset for t in model.tensors
    ]
    assert [f.span.stop - f.span.start for f in fragments] == [f.layout.size for f in fragments]


@quick
@given(cuts())
def test_leaves_of_the_fragments_are_the_runs_leaves(case):
    model, parts = case

    shifted = [
        Span(f.span.start + leaf.start, f.span.start + leaf.stop)
        for f in layout.cut(model, parts)
        for leaf in f.layout.leaves
    ]

    assert shifted == list(model.leaves)


@quick
@given(cuts())
def test_groups_of_a_fragment_count_from_its_own_start(case):
    model, parts = case

    groups = [
        [tile.first_group for tile in f.layout.tiles(GROUP_BYTES)] for f in layout.cut(model, parts)
    ]

    assert groups == [list(range(len(own))) for own in groups]


@quick
@given(layouts, st.randoms(use_true_random=False))
def test_a_layout_in_another_order_has_the_same_tensors(model, random):
    names = [t.name for t in model.tensors]
    random.shuffle(names)

    ordered = model.ordered(names)

    assert [t.name for t in ordered.tensors] == names
    assert ordered.ordered(t.name for t in model.tensors) == model


def test_one_fragment_is_the_layout_itself():
    (only,) = layout.cut(two(), [["embed", "head"]])

    assert only == layout.Fragment(two(), Span(0, two().size))
    assert only.layout.digest == two().digest


def test_a_fragments_part_of_the_buffer_writes_through():
    _, head = layout.cut(two(), [["embed"], ["head"]])
    flat = two().zeros()

    head.of(flat).fill_(3.0)

    assert flat.tolist() == [0.0] * 12 + [3.0] * 5


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([["embed"]], "'head' has no place"),
        ([["embed"], ["head", "tail"]], "'tail' is not in this layout"),
        ([["embed"], ["head", "embed"]], "'embed' is listed twice"),
        ([["head"], ["embed"]], "order it first"),
        ([["embed"], [], ["head"]], "fragment 1 has no tensor"),
    ],
    ids=["missing", "unknown", "twice", "order", "empty"],
)
def test_cut_refuses_parts_that_are_not_the_layouts_tensors_in_order(parts, told):
    with pytest.raises(LayoutMismatch, match=told):
        layout.cut(two(), parts)
