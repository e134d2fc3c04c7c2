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


# --- packing and viewing ---


@quick
@given(small_layouts)
def test_views_give_back_what_was_packed(model):
    named = {t.name: torch.arange(prod(t.shape)).reshape(t.shape) / 8 for t in model.tensors}
    flat = model.zeros()

    model.pack(named, flat)

    assert all(torch.equal(view, named[name]) for name, view in model.views(flat).items())


def test_pack_places_tensors_in_the_order_of_the_layout():
    flat = two().zeros()

    two().pack({"embed": torch.full((4, 3), 1.0), "head": torch.full((5,), 2.0)}, flat)

    assert flat.tolist() == [1.0] * 12 + [2.0] * 5


def test_pack_widens_bfloat16_without_a_change_of_value():
    model = Layout.of([("w", (3,), "bfloat16")])
    values = torch.tensor([1.0, -0.15625, 3e38], dtype=torch.bfloat16)
    flat = model.zeros()

    model.pack({"w": values}, flat)

    assert torch.equal(flat, values.float())


def test_pack_takes_parameters_that_require_a_gradient():
    model = Layout.of([("w", (2,), "float32")])
    flat = model.zeros()

    model.pack({"w": torch.nn.Parameter(torch.ones(2))}, flat)

    assert not flat.requires_grad


def test_view_writes_through_to_the_buffer():
    flat = two().zeros()

    two().views(flat)["head"].fill_(3.0)

    assert flat.tolist() == [0.0] * 12 + [3.0] * 5


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"embed": torch.zeros(4, 3), "tail": torch.zeros(5)}, "tail"),
        ({"embed": torch.zeros(3, 4), "head": torch.zeros(5)}, "embed"),
        ({"embed": torch.zeros(4, 3), "head": torch.zeros(5).double()}, "float64"),
        ({"head": torch.zeros(5), "embed": torch.zeros(4, 3)}, "head"),
        ({"embed": torch.zeros(4, 3)}, "1 tensors"),
        ({"embed": torch.zeros(4, 3), "head": torch.zeros(5), "x": torch.zeros(1)}, "3 tensors"),
    ],
    ids=["name", "shape", "dtype", "order", "missing", "extra"],
)
def test_pack_refuses_other_tensors_by_name_and_leaves_the_buffer(named, told):
    flat = two().zeros().fill_(9.0)

    with pytest.raises(LayoutMismatch, match=told):
        two().pack(named, flat)

    assert flat.tolist() == [9.0] * 17


def test_check_table_says_whose_table_differs():
    table = layout.Layout.of([("embed", (4, 3), "float32"), ("head", (6,), "float32")]).table()

    with pytest.raises(LayoutMismatch, match=r"the frame has \['head', 'float32', \[6\]\]"):
        two().check_table(table, subject="the frame")


def test_check_passes_the_model_the_layout_was_made_of():
    named = {"embed": torch.zeros(4, 3), "head": torch.zeros(5)}

    Layout.of_tensors(named).check(named)


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
