"""Units, who owns what of them, and which rows a rank computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import Layout, Span
from atoll.models import registry
from atoll.strategies.sharded import micro_batches, units
from atoll.strategies.sharded.units import Units

SIZE = {"vocab": 10, "block": 6, "layers": 12, "heads": 2, "width": 4}
MODEL = registry.layout({"architecture": "gpt", **SIZE, "tied": True})


def layout(*names: str) -> Layout:
    return Layout.of((name, [3], "float32") for name in names)


def test_root_comes_first_and_then_each_block_by_its_number():
    made = Units.of_model(MODEL)

    assert [unit.module for unit in made.units] == ["", *(f"blocks.{k}" for k in range(12))]
    root = [t.name for t in made.units[0].layout.tensors]
    assert root == ["tokens.weight", "positions.weight", "norm.weight"]  # the tied head has none
    assert made.units[3].layout.tensors[0].name == "blocks.2.attention_norm.weight"


def test_order_of_the_tensors_does_not_matter():
    turned = MODEL.ordered([t.name for t in reversed(MODEL.tensors)])

    assert [set(names) for names in units.names(turned)] == [
        set(names) for names in units.names(MODEL)
    ]


def test_units_are_spans_of_the_runs_layout():
    made = Units.of_model(MODEL)

    assert made.units[0].span.start == 0
    assert made.units[-1].span.stop == made.layout.size == MODEL.size
    assert all(
        a.span.stop == b.span.start for a, b in zip(made.units, made.units[1:], strict=False)
    )


def test_layout_that_is_not_ordered_by_unit_is_refused():
    with pytest.raises(LayoutMismatch, match="order"):
        Units.of(MODEL)


def test_model_without_blocks_is_all_root():
    assert units.names(layout("a.weight", "b.weight")) == [["a.weight", "b.weight"]]


def test_numbered_parameters_are_in_the_root():
    found = units.names(layout("scales.0", "scales.1", "layers.0.w", "out"))

    assert found == [["scales.0", "scales.1", "out"], ["layers.0.w"]]


def test_model_of_blocks_alone_has_no_root():
    made = Units.of_model(layout("0.weight", "1.weight"))

    assert [unit.module for unit in made.units] == ["0", "1"]


@given(size=st.integers(1, 9))
def test_shards_hold_every_element_once(size):
    made = Units.of_model(MODEL)

    owned = [span for rank in range(size) for span in made.owned(rank, size)]

    elements = sorted(k for span in owned for k in range(span.start, span.stop))
    assert elements == list(range(MODEL.size))
    assert max(made.shard_size(r, size) for r in range(size)) <= MODEL.size / size + len(made.units)


def test_rank_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="rank=3 is not one of size=3"):
        Units.of_model(MODEL).owned(3, 3)


# Rows


@given(batch=st.integers(0, 40), size=st.integers(1, 9), count=st.integers(1, 5), data=st.data())
def test_every_row_is_computed_once_whatever_the_number_of_ranks(batch, size, count, data):
    made = [micro_batches.of(batch, rank=r, size=size, count=count) for r in range(size)]

    rows = [k for own in made for m in own if m.counts for k in range(m.rows.start, m.rows.stop)]
    assert rows == list(range(batch))
    assert all(len(own) == count for own in made)
    assert sum(m.num_rows for own in made for m in own) == batch


def test_rank_without_rows_has_a_stand_in_that_counts_as_none():
    [only] = micro_batches.of(1, rank=0, size=2, count=1)

    assert (only.rows, only.counts, only.num_rows) == (Span(0, 1), False, 0)
