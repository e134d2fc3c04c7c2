"""Threads share an outer step by parts of the weights; the bits and the failures are of one."""

import threading

import pytest

from atoll.codecs.settings import CodecSettings
from atoll.compiled import base
from atoll.coordinator.rounds.spool import FrameSpooler
from atoll.errors import StorageFull
from atoll.layout import GROUP_ELEMENTS, TILE_BYTES, Layout
from atoll.optim.settings import NesterovSettings
from atoll.strategies.outer import PayloadSink
from tests.clusters import Cluster
from tests.ledgers import alone

# Three full tiles and a rest; the tensors end inside tiles, so leaves lie over the edges of parts.
DEEP = Layout.of(
    [
        ("embedding", (5 * GROUP_ELEMENTS + 33,), "float32"),
        ("norm", (257,), "float32"),
        ("head", (8 * GROUP_ELEMENTS,), "float32"),
    ]
)
CODECS = ["fp32", "bf16", "int8"]


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    NesterovSettings().build()  # and the loops that it brings
    for name in CODECS:
        CodecSettings.model_validate({"codec": name}).build()
    base.compiled.prepare(base.LARGE_ELEMENTS)
    base.compiled.wait()
    assert base.compiled.ready(base.FULL_TILE_ELEMENTS)


def trained(home, *, codec: str, threads: int) -> Cluster:
    settings = {"upload.codec": codec, "download.codec": codec}
    cluster = Cluster(home, settings, layout=DEEP, threads=threads)
    cluster.rounds(2, *cluster.pair())
    return cluster


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_rounds_of_several_threads_have_the_bits_of_one(tmp_path, codec, threads):
    alone = trained(tmp_path / "alone", codec=codec, threads=1)
    shared = trained(tmp_path / "shared", codec=codec, threads=threads)

    assert shared.digests_by_round() == alone.digests_by_round()
    assert shared.published_digest == alone.published_digest
    assert shared.audit(with_replay=True).problems == []
    for cluster in (alone, shared):
        cluster.close()


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_with_compiled_loops_have_the_bits_of_those_without(tmp_path, codec, monkeypatch):
    fast = trained(tmp_path / "fast", codec=codec, threads=2)
    monkeypatch.setattr(base.compiled, "ready", lambda _: False)
    plain = trained(tmp_path / "plain", codec=codec, threads=1)

    assert fast.digests_by_round() == plain.digests_by_round()
    # What one computed the other can replay.
    assert fast.audit(with_replay=True).problems == []
    for cluster in (fast, plain):
        cluster.close()


def apply_first_round(cluster: Cluster, sink: PayloadSink, *, threads: int) -> None:
    replay = cluster.replay(threads=threads)
    contributions = alone(cluster.ledger).contributions.of_round(1)
    replay.apply(replay.restore(None), 1, contributions, sink)


def test_step_that_fails_in_one_thread_has_ended_in_all(tmp_path):
    """Else the others would write on, into files and weights that are somebody else's by then."""
    cluster = trained(tmp_path, codec="int8", threads=1)
    first, second = DEEP.parts(2, TILE_BYTES)
    other_began, failed = threading.Event(), threading.Event()
    ended = []

    def sink(span, payload):
        if span.start in range(first.start, first.stop):
            assert other_began.wait(60)
            failed.set()
            raise StorageFull("no room")
        other_began.set()
        assert failed.wait(60)
        ended.append(span.stop)

    with pytest.raises(StorageFull, match="no room"):
        apply_first_round(cluster, sink, threads=2)

    assert ended[-1:] == [second.stop]
    cluster.close()


def test_failure_in_another_thread_is_raised(tmp_path):
    cluster = trained(tmp_path, codec="int8", threads=1)
    last = list(DEEP.tiles(TILE_BYTES))[-1]

    def sink(span, payload):
        if span == last:
            raise StorageFull("no room")

    with pytest.raises(StorageFull, match="no room"):
        apply_first_round(cluster, sink, threads=3)
    cluster.close()


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("tile", range(4))
def test_disk_that_fills_up_under_any_thread_leaves_the_version_and_is_tried_again(
    tmp_path, monkeypatch, threads, tile
):
    expected = trained(tmp_path / "alone", codec="int8", threads=1)
    cluster = Cluster(
        tmp_path / "full",
        {"upload.codec": "int8", "download.codec": "int8"},
        layout=DEEP,
        threads=threads,
    )
    a, b = cluster.pair()
    for island in (a, b):
        island.contribute()
    refused = list(DEEP.tiles(TILE_BYTES))[tile]
    real = FrameSpooler.__call__

    def write(self, span, payload):
        if span == refused:
            raise StorageFull("no room")
        real(self, span, payload)

    with monkeypatch.context() as patch:
        patch.setattr(FrameSpooler, "__call__", write)
        versions = cluster.coordinator.weights
        contributions = cluster.freeze()
        with pytest.raises(StorageFull):
            versions.compute(1, contributions)
        assert versions.current.version == 0
        assert list(cluster.home.rglob("update-*")) == []

    digests = versions.compute(1, contributions)

    assert digests.master.root == expected.digests_by_round()[0]
    for each in (expected, cluster):
        each.close()
