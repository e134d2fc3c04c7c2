"""Several datasets as one: what they must share, how their rows take turns; streams."""

import pytest
import torch

from atoll import config
from atoll.data import base, batches, mixture, parts, registry
from atoll.data.mixture import Mixture, NamedDataset
from atoll.data.synthetic import SyntheticCorpus
from atoll.errors import ConfigError, StateDamaged
from atoll.rows import RowRange

SHAPE = {"kind": "synthetic", "held_out_rows": 2, "block": 4}


def corpus(seed: int, rows: int = 10, **changes: int) -> SyntheticCorpus:
    settings = {"held_out_rows": 2, "block": 4} | changes
    return SyntheticCorpus(seed=seed, rows=rows, **settings)


def pair(**changes: int) -> Mixture:
    return Mixture(
        [NamedDataset("x", 3, corpus(1)), NamedDataset("y", 1, corpus(2, rows=6, **changes))]
    )


def names(made: Mixture) -> dict[str, str]:
    """dataset_id by name."""
    return {one.name: base.dataset_id(one.dataset.identity()) for one in made.named}


def test_mixture_is_its_parts_one_after_another():
    made = pair()

    assert (made.rows, made.held_out_rows, made.block, made.vocab) == (16, 4, 4, 32)
    assert (made.row(9) == corpus(1).row(9)).all()
    assert (made.row(10) == corpus(2, rows=6).row(0)).all()
    assert (made.held_out(3) == corpus(2, rows=6).held_out(1)).all()


def test_row_past_the_last_part_is_refused():
    with pytest.raises(IndexError, match="row 16 is outside 0 to 15"):
        pair().row(16)


def test_parts_are_read_from_the_identity_without_the_data():
    made = pair()

    found = parts.parts_of(made.identity())

    assert [(p.name, p.length, p.weight) for p in found] == [("x", 10, 3), ("y", 6, 1)]
    assert [p.dataset_id for p in found] == list(made.parts)


@pytest.mark.parametrize(("field", "value", "other"), [("block", 8, 4), ("vocab", 16, 32)])
def test_parts_that_differ_in_shape_are_refused_by_name(field, value, other):
    with pytest.raises(ConfigError, match=f"data.{field}={value} of 'y' is not {other}, which 'x'"):
        pair(**{field: value})


@pytest.mark.parametrize("named", [("x", "x", 2), ("x", "y", 1)], ids=["same name", "same data"])
def test_parts_that_are_not_different_are_refused(named):
    one, other, seed = named

    with pytest.raises(ConfigError, match="are not all different"):
        Mixture([NamedDataset(one, 1, corpus(1)), NamedDataset(other, 1, corpus(seed))])


def test_rows_of_a_round_take_turns_by_their_number():
    made = pair()
    ids = names(made)
    ranges = [RowRange(ids["x"], 0, 6), RowRange(ids["y"], 10, 12)]

    found = [(dataset is made.parts[ids["x"]], p) for dataset, p in mixture.turns(made, ranges)]

    x, y = [p for first, p in found if first], [p for first, p in found if not first]
    assert (x, y) == ([0, 1, 2, 3, 4, 5], [10, 11])
    assert [first for first, _ in found] == [True, True, False, True, True, True, False, True]


def test_batches_hold_rows_of_every_part():
    made = pair()
    ids = names(made)

    [rows] = batches.batches(
        made, [RowRange(ids["x"], 0, 3), RowRange(ids["y"], 0, 1)], batch=4, seed=1
    )

    alone = [
        torch.cat(list(batches.batches(corpus(1), [RowRange("", 0, 3)], batch=3, seed=1))),
        torch.cat(list(batches.batches(corpus(2, rows=6), [RowRange("", 0, 1)], batch=1, seed=1))),
    ]
    order = [0, 1, 3, 2]  # where x, x, y, x stand in the parts one after another
    assert torch.equal(rows, torch.cat(alone)[order])


def test_rows_of_a_dataset_that_is_none_of_the_parts_are_refused():
    with pytest.raises(StateDamaged, match="'feed' are assigned"):
        list(mixture.turns(pair(), [RowRange("feed", 0, 1)]))


# Streams


def test_stream_has_rows_without_end_in_their_own_order():
    stream = corpus(1, rows=0)

    [rows] = batches.batches(stream, [RowRange("", 5, 7)], batch=2, seed=9)

    expected = [torch.from_numpy(stream.row(5)), torch.from_numpy(stream.row(6))]
    assert torch.equal(rows, torch.stack(expected))
    assert len(stream.row(2**40)) == 5


def test_held_out_rows_of_a_stream_are_no_training_rows():
    stream = corpus(1, rows=0)

    held_out = [tuple(stream.held_out(n)) for n in range(2)]

    assert not {tuple(stream.row(n)) for n in range(50)} & set(held_out)


def test_length_is_no_part_of_the_id():
    """So the same data with another length is refused instead of passing for other data."""
    assert base.dataset_id(corpus(1).identity()) == base.dataset_id(corpus(1, rows=11).identity())
    assert base.dataset_id(corpus(1).identity()) != base.dataset_id(corpus(2).identity())


# The run file


RUN = {"name": "m", "sync_every": 1, "stop": {"rounds": 1}, "model": {}}


def test_run_file_lists_datasets_and_keeps_their_places_apart(tmp_path):
    loaded = config.parse(
        RUN
        | {
            "data": [
                {"kind": "text", "name": "words", "weight": 3, "path": "a.txt", "block": 4},
                {"kind": "synthetic", "rows": 0},
                {"kind": "tokens", "path": "/b"},
            ]
        },
        base=tmp_path,
    )

    assert loaded.data == {
        "kind": "mixture",
        "datasets": [
            {"kind": "text", "name": "words", "weight": 3, "block": 4},
            {"kind": "synthetic", "rows": 0},
            {"kind": "tokens"},
        ],
    }
    assert loaded.data_location == f"words={tmp_path / 'a.txt'};tokens=/b"


def test_run_file_with_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match=r"must be a \[data\] section, or"):
        config.parse(RUN | {"data": []})


def test_named_files_are_found(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    entry = {"kind": "text", "name": "words", "block": 4, "held_out_rows": 1}
    definition = {"kind": "mixture", "datasets": [entry]}

    opened = registry.open_dataset(definition, location=f"words={tmp_path / 'a'}")

    assert isinstance(opened, Mixture)
    assert opened.row(0).tolist() == [0, 1, 2, 3, 4]


REFUSED: dict[str, tuple[dict[str, object], str | None, str]] = {
    "weight 0": ({"weight": 0}, None, "data.weight=0 of 'synthetic' must be from 1 to"),
    "weight of text": ({"weight": "2"}, None, "data.weight='2' must be a whole number"),
    "name": ({"name": "a b"}, None, "data.name='a b' must be 1 to 64 characters"),
    "place of nobody": ({}, "other=/x", r"given for \['other'\]; the run's datasets are"),
    "place without a name": ({}, "/x", "'/x' must be name=place"),
}


@pytest.mark.parametrize(("changes", "location", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_definition_that_breaks_a_rule_is_refused_by_name(changes, location, says):
    entry = {**SHAPE, "seed": 1, "rows": 4, **changes}

    with pytest.raises(ConfigError, match=says):
        registry.open_dataset({"kind": "mixture", "datasets": [entry]}, location=location)
