"""What an island keeps of the published weights for its next life, and what that makes of it."""

import logging
from pathlib import Path

import pytest
import torch

from atoll.codecs.fp32.codec import Fp32
from atoll.island.gather import kept
from atoll.island.state.weights import IslandWeights
from atoll.layout import Layout, byte_view
from atoll.strategies import registry
from atoll.sums import digest
from tests import gather_runs
from tests.clusters import flip_byte, module_of

LAYOUT = Layout.of([("a", (300,), "float32"), ("b", (7, 5), "float32")])
VALUES = torch.arange(LAYOUT.size, dtype=torch.float32) / 7
ROOT = digest.digest(LAYOUT, VALUES).root


class Kept:
    """A directory as a keeper."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, version: int, root: str, weights: memoryview) -> None:
        kept.keep(self.directory, version, root, weights)

    def recall(self, weights: memoryview) -> tuple[int, str] | None:
        return kept.recall(self.directory, weights)


def life(directory: Path) -> IslandWeights:
    """The weights of a process that has just begun."""
    made = IslandWeights(
        module_of(LAYOUT), LAYOUT, strategy=registry.of(gather_runs.manifest()), download=Fp32()
    )
    made.keeper = Kept(directory)
    made.recall()
    return made


def published(weights: IslandWeights) -> torch.Tensor:
    weights.reset()
    return weights.local


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    Kept(tmp_path / "gather").keep(5, ROOT, byte_view(VALUES))
    return tmp_path / "gather"


def test_next_life_holds_the_version_that_was_kept(directory):
    found = life(directory)

    assert found.held == (5, ROOT) and found.base_digest(found.carried(6)) == ROOT
    assert torch.equal(published(found), VALUES)


@pytest.mark.parametrize("place", [8, 40, 1000])
def test_kept_weights_that_are_damaged_are_not_held(directory, place):
    """In their digest, in the first and in a later weight."""
    flip_byte(directory / kept.NAME, place)

    assert life(directory).held == (None, None)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_kept_weights_of_another_size_are_not_held(directory, change):
    path = directory / kept.NAME
    path.write_bytes(change(path.read_bytes()))

    assert life(directory).held == (None, None)


def test_first_life_holds_nothing(tmp_path):
    assert life(tmp_path / "none").held == (None, None)


def test_draft_of_a_life_that_died_while_it_kept_changes_nothing(directory):
    (directory / f"{kept.NAME}.draft").write_bytes(b"half")

    assert life(directory).held == (5, ROOT)


def test_disk_that_refuses_costs_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "gather").write_text("a file where the directory belongs")

    with caplog.at_level(logging.WARNING):
        Kept(tmp_path / "gather").keep(5, ROOT, byte_view(VALUES))

    assert [record.message for record in caplog.records] == ["version is not kept"]
