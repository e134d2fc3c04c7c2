"""A gather run trained once more from its records: islands publish, are pulled and gather again."""

import logging
from pathlib import Path
from typing import Any

import pytest

from atoll.island.gather.buckets import IslandBuckets
from tests import following
from tests.tiny import simulate

SETTINGS: dict[str, Any] = {
    "strategy": "gather",
    "upload.codec": "topk",
    "outer.optimizer": "sgd",
    "membership.min_workers": 3,
    "inner.schedule": {"warmup_tokens": 1_000},
    "gather.buckets": {"main": {"url": "s3://atoll"}, "other": {"url": "s3://other"}},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("run")
    simulate(3, directory=made, **SETTINGS)
    return made


def test_training_a_gather_run_again_gives_its_weights(home, tmp_path, monkeypatch, caplog):
    made: list[IslandBuckets] = []
    real = IslandBuckets.collect

    def collect(self: IslandBuckets, wanted: Any) -> None:
        real(self, wanted)
        made.append(self)

    monkeypatch.setattr(IslandBuckets, "collect", collect)
    with caplog.at_level(logging.WARNING):
        found = following.followed(home, tmp_path)

    assert found.agrees
    assert (found.rounds, found.contributions) == (3, 9)
    assert len(made) == 3 * 2 and caplog.records == []  # versions 1 and 2, by each island itself


def test_training_from_other_settings_does_not(home, tmp_path, monkeypatch):
    """The control: the digest depends on what is trained."""
    following.tell_other_tokens(monkeypatch)

    assert not following.followed(home, tmp_path).agrees
