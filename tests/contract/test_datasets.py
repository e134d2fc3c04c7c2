"""One suite over every kind of dataset, opened as a worker opens it."""

import json

import numpy as np
import pytest

from atoll.data import base, registry

BLOCK = 16
HELD_OUT_ROWS = 3


def numbers(count):
    return np.random.Generator(np.random.Philox(key=5)).integers(0, 250, count)


KINDS = ["synthetic", "text", "text in many files", "tokens16", "tokens32", "mixture"]


@pytest.fixture(params=KINDS)
def opened(request, tmp_path):
    """A function that opens the dataset once more from scratch."""
    shape = {"block": BLOCK, "held_out_rows": HELD_OUT_ROWS}
    values = numbers(40 * BLOCK + 5)
    location = None
    match request.param:
        case "synthetic":
            definition = {"kind": "synthetic", "seed": 1, "rows": 37, **shape}
        case "text":
            definition = {"kind": "text", **shape}
            location = tmp_path / "text"
            location.write_bytes(values.astype("u1").tobytes())
        case "text in many files":
            definition = {"kind": "text", **shape}
            location = tmp_path / "*.txt"
            for index, piece in enumerate(np.array_split(values.astype("u1"), 90)):
                (tmp_path / f"{index:02}.txt").write_bytes(piece.tobytes())
        case "tokens16" | "tokens32":
            dtype = request.param.replace("tokens", "uint")
            definition = {"kind": "tokens", "dtype": dtype, "vocab": 250, **shape}
            location = tmp_path / "tokens"
            location.write_bytes(values.astype(dtype).tobytes())
        case "mixture":
            other = {"kind": "synthetic", "seed": 1, "rows": 9, "vocab": 256, "block": BLOCK}
            parts = [{"kind": "text", **shape}, {**other, "held_out_rows": 0, "weight": 3}]
            definition = {"kind": "mixture", "datasets": parts}
            (tmp_path / "text").write_bytes(values[: 31 * BLOCK + 5].astype("u1").tobytes())
            location = f"text={tmp_path / 'text'}"
    return lambda: registry.open_dataset(definition, location=location and str(location))


@pytest.fixture
def dataset(opened):
    return opened()


def every_row(dataset):
    return [dataset.row(i) for i in range(dataset.rows)]


def every_held_out_row(dataset):
    return [dataset.held_out(i) for i in range(dataset.held_out_rows)]


def test_dataset_has_the_rows_that_fit(dataset):
    assert (dataset.rows, dataset.held_out_rows, dataset.block) == (37, HELD_OUT_ROWS, BLOCK)


def test_rows_are_int64_of_block_and_one(dataset):
    rows = every_row(dataset) + every_held_out_row(dataset)

    assert {(row.dtype, row.shape) for row in rows} == {(np.dtype(np.int64), (BLOCK + 1,))}


def test_tokens_are_below_vocab(dataset):
    rows = np.stack(every_row(dataset) + every_held_out_row(dataset))

    assert 0 <= rows.min() <= rows.max() < dataset.vocab


def test_rows_are_the_same_when_opened_again(dataset, opened):
    again = opened()

    assert np.array_equal(np.stack(every_row(dataset)), np.stack(every_row(again)))
    assert np.array_equal(
        np.stack(every_held_out_row(dataset)), np.stack(every_held_out_row(again))
    )


def test_rows_do_not_depend_on_the_order_they_are_asked_for(dataset, opened):
    backwards = [opened().row(i) for i in reversed(range(dataset.rows))]

    assert np.array_equal(np.stack(every_row(dataset)), np.stack(backwards[::-1]))


def test_rows_are_the_callers_own(dataset):
    before = dataset.row(0).copy()

    dataset.row(0)[:] = -1

    assert np.array_equal(dataset.row(0), before)


def test_rows_differ_from_each_other(dataset):
    rows = every_row(dataset) + every_held_out_row(dataset)

    assert len({row.tobytes() for row in rows}) == 40


@pytest.mark.parametrize("index", [-1, 37])
def test_row_outside_the_data_is_refused(dataset, index):
    with pytest.raises(IndexError, match="0 to 36"):
        dataset.row(index)


@pytest.mark.parametrize("index", [-1, HELD_OUT_ROWS])
def test_held_out_row_outside_the_data_is_refused(dataset, index):
    with pytest.raises(IndexError, match="0 to 2"):
        dataset.held_out(index)


def test_identity_survives_json(dataset):
    identity = dataset.identity()

    assert json.loads(json.dumps(identity)) == identity


def test_identity_names_no_path(dataset, tmp_path):
    assert str(tmp_path) not in json.dumps(dataset.identity())


def test_identity_states_the_shape(dataset):
    identity = dataset.identity()

    assert [identity[k] for k in ("rows", "held_out_rows", "block", "vocab")] == [
        dataset.rows,
        dataset.held_out_rows,
        dataset.block,
        dataset.vocab,
    ]


def test_identity_is_the_same_when_opened_again(dataset, opened):
    assert base.dataset_id(dataset.identity()) == base.dataset_id(opened().identity())
