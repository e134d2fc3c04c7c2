"""Rounds of more contributions than the process may have files open: the same bits, restarts too.

`make storm` folds 5,000 contributions (ATOLL_WIDE_CONTRIBUTIONS) under a limit of 256 files.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll import open_files
from atoll.errors import Exhausted
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.ledger.records import ContributionRecord
from tests.clusters import Cluster, displacement, values
from tests.scarce_files import at_most, leaving

TINY = Layout.of([("matrix", (7, 3), "float32"), ("vector", (12,), "float32")])
TILED = Layout.of([("matrix", (9 * GROUP_ELEMENTS + 33,), "float32")])  # three tiles
FILES = 256
WIDE = int(os.environ.get("ATOLL_WIDE_CONTRIBUTIONS", "600"))
WORKERS = 60
PLAIN = {"outer.optimizer": "sgd", "outer.lr": 1.0, "upload.codec": "fp32"}


def frozen(home: Path) -> tuple[Cluster, list[ContributionRecord]]:
    """A run whose first round has a contribution of every worker and is frozen, not computed."""
    data = {"kind": "by hand", "rows": 40 * WORKERS, "block": 4, "held_out_rows": 6}
    cluster = Cluster(home, {"membership.min_workers": WORKERS}, layout=TINY, data=data)
    islands = [cluster.island(f"w{number:05d}") for number in range(WORKERS)]
    for island in islands:
        island.contribute()
    return cluster, cluster.freeze()


def root_of(cluster: Cluster, contributions: list[ContributionRecord], *, threads: int = 1) -> str:
    """The digest of version 1 made of these."""
    replay = cluster.replay(threads=threads)
    return replay.apply(replay.restore(None), 1, contributions).digests.master.root


def test_frozen_round_of_more_contributions_than_files_closes_after_a_restart(tmp_path):
    cluster, contributions = frozen(tmp_path)
    expected = root_of(cluster, contributions)
    assert len(contributions) == WORKERS

    with at_most(leaving(WORKERS // 2)):
        cluster.restart()
        assert cluster.settle() == 1
        assert cluster.digest == expected
        cluster.restart()  # and by replay of the published round
        assert cluster.audit(with_replay=True).problems == []

    assert cluster.digests_by_round() == [expected]
    cluster.close()


def test_round_that_opens_everything_at_once_waits_frozen_and_closes_when_files_are_free(
    tmp_path, monkeypatch
):
    """The control: without groups the same limit is not enough. And nothing ends by it."""
    cluster, contributions = frozen(tmp_path)
    expected = root_of(cluster, contributions)

    with monkeypatch.context() as patch, at_most(leaving(WORKERS // 2)):
        patch.setattr(open_files, "share", lambda: WORKERS)
        with pytest.raises(Exhausted, match="Too many open files"):
            root_of(cluster, contributions)
        assert cluster.run_clock(seconds=3.0) == 0
        assert "open" in cluster.coordinator.disk.reason

    assert cluster.run_clock(seconds=3.0) == 1
    assert cluster.digest == expected
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


def stored(cluster: Cluster, layout: Layout, count: int) -> list[ContributionRecord]:
    """So many contributions to round 1 as blobs, in canonical order, beside the ledger."""
    a, _ = cluster.pair()
    given = a.assignment()
    model = a.contribute()
    found = []
    for number in range(count):
        name = f"w{number:05d}"
        frame = a.frame(given, delta=displacement(layout, name, 1))
        writer = cluster.blobs.writer()
        writer.write(frame.data)
        ref = writer.commit()
        found.append(replace(model, worker_id=name, sha256=ref.sha256, weight=1 + number % 3))
    return found


@pytest.mark.storm
def test_fold_of_many_contributions_under_few_files_has_the_bits_of_all_open(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, PLAIN, layout=TINY)
    contributions = stored(cluster, TINY, WIDE)
    with monkeypatch.context() as patch, at_most(WIDE + leaving(64)):
        patch.setattr(open_files, "share", lambda: WIDE)
        expected = root_of(cluster, contributions)

    with at_most(FILES):
        assert open_files.share() == FILES // 4
        replay = cluster.replay()
        version = replay.restore(None)
        found = replay.apply(version, 1, contributions).digests.master.root

    assert found == expected
    total = np.zeros(TINY.size, np.float64)
    for one in contributions:
        total += one.weight * displacement(TINY, one.worker_id, 1).numpy().astype(np.float64)
    mean = total / sum(one.weight for one in contributions)
    start = values(TINY, "initial", scale=1.0).numpy()
    np.testing.assert_allclose(version.state.master.numpy(), start - mean, rtol=1e-6, atol=1e-6)
    cluster.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_of_contributions_that_are_opened_anew_have_the_same_bits(
    tmp_path, monkeypatch, threads
):
    cluster = Cluster(tmp_path, PLAIN, layout=TILED)
    contributions = stored(cluster, TILED, 5)
    expected = root_of(cluster, contributions)

    for held in range(5):
        monkeypatch.setattr(open_files, "share", lambda held=held: held)
        assert root_of(cluster, contributions, threads=threads) == expected

    swapped = [contributions[1], contributions[0], *contributions[2:]]
    # The control: the sum knows its order, so other terms first give other bits.
    assert root_of(cluster, [*swapped[2:], *swapped[:2]], threads=threads) != expected
    cluster.close()
