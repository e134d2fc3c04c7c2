"""Runs in the integer and sparse codecs: both ways, with error feedback, replayed bit for bit."""

from typing import Any

import pytest
import torch

from atoll.codecs.topk import chunks
from atoll.codecs.topk.codec import TopK
from atoll.errors import FrameError
from tests import clusters, tiny
from tests.clusters import Cluster, Frame, HandIsland

WAYS: dict[str, dict[str, Any]] = {
    "int4": {"upload": {"codec": "int4"}, "download": {"codec": "int4"}},
    "int8": {"upload": {"codec": "int8"}, "download": {"codec": "int8", "rounding": "stochastic"}},
    "sign": {"upload": {"codec": "sign"}, "download": {"codec": "sign", "block": 16}},
    "topk": {"upload": {"codec": "topk"}, "download": {"codec": "topk"}},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS.keys())
def test_run_travels_both_ways_and_replays(tmp_path, settings):
    cluster = Cluster(tmp_path, settings)

    cluster.rounds(3, *cluster.pair())

    assert cluster.version == 3
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


def test_islands_train_with_a_decay_that_comes_from_the_manifest(tmp_path):
    settings: dict[str, Any] = {
        "upload.codec": "topk",
        "download": {"codec": "int4", "rounding": "stochastic"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
    decayed = tiny.simulate(directory=tmp_path / "run", **settings)
    settings["upload.decay"] = 1.0
    undecayed = tiny.simulate(**settings)

    report, _ = clusters.audited(tmp_path / "run")
    assert report.clean
    assert report.digest == decayed.digest != undecayed.digest


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, {"upload.codec": "topk"})
    yield made
    made.close()


def malformed(island: HandIsland) -> Frame:
    """A frame whose checksum is right, and which names one place for all that it keeps."""
    size = island.cluster.layout.size
    delta = torch.zeros(size)
    delta[:100] = 1.0  # what is kept stands in one row
    payload = TopK().encode(delta, noise=None, first_group=0)
    payload[: -(-6 * chunks.num_kept(size) // 8)] = 0  # the low bits: the first of the row
    return clusters.make_frame(island.header(island.assignment()), payload.numpy().tobytes())


def test_malformed_places_are_refused_before_they_are_stored(cluster):
    a, b = cluster.pair()
    sent = malformed(a)
    state, blobs = cluster.coordinator.state_hash(), cluster.blob_names()

    with pytest.raises(FrameError, match="names places that do not ascend"):
        a.send(sent)

    assert cluster.coordinator.status().refusals == {"FRAME": 1}
    assert cluster.coordinator.state_hash() == state
    assert (cluster.blob_names(), cluster.drafts()) == (blobs, [])
    cluster.rounds(1, a, b)
    assert cluster.version == 1


def test_without_the_check_malformed_places_would_be_folded(cluster, monkeypatch):
    """The control of the test above."""
    a, b = cluster.pair()
    monkeypatch.setattr(TopK, "check", lambda *_: None)

    a.send(malformed(a))
    b.contribute()
    cluster.settle()

    assert cluster.version == 1
