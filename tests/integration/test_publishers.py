"""An island registers its key and its bucket: once, for good, and nobody else's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from tests.clusters import Cluster, HandIsland
from tests.ledgers import alone
from tests.publishing import GatherCluster, PublishingIsland

SMALL_ORDER = "01" + "00" * 31


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatherCluster]:
    made = GatherCluster(tmp_path)
    yield made
    made.close()


def refused(cluster: GatherCluster, island: HandIsland, match: str, **changes: object) -> None:
    """It is refused for this, and nothing of it stays."""
    before = cluster.coordinator.state_hash()

    with pytest.raises(ConfigError, match=match):
        cluster.coordinator.register(island.register_request(**changes))

    assert cluster.coordinator.state_hash() == before


def test_key_and_bucket_are_recorded_and_outlive_the_coordinator(cluster):
    a, b = cluster.islands("ab")
    cluster.restart()

    found = {p.worker_id: (p.public_key, p.bucket) for p in alone(cluster.ledger).publishers.all()}

    assert found == {i.name: (i.signing.public.hex, "main") for i in (a, b)}
    a.join()  # with the same key it comes back
    assert a.contribute_by_pull().receipt


def test_island_without_a_key_is_refused(cluster):
    refused(cluster, HandIsland(cluster, "a"), "neither a key nor a bucket", publishes=None)


def test_bucket_that_the_run_does_not_have_is_refused_by_name(cluster):
    a = PublishingIsland(cluster, "a")
    a.bucket = "elsewhere"

    refused(cluster, a, "bucket='elsewhere' of worker_id='a' is not one of the run's, main, other")


def test_key_of_small_order_is_refused(cluster):
    told = {"key": SMALL_ORDER, "bucket": "main"}

    refused(cluster, PublishingIsland(cluster, "a"), "small order", publishes=told)


def test_key_of_another_worker_is_refused_by_its_name(cluster):
    a = cluster.island("a")
    b = PublishingIsland(cluster, "b")
    b.signing = a.signing

    refused(cluster, b, "of worker_id='b' is that of 'a'")


@pytest.mark.parametrize("change", ["key", "bucket"])
def test_worker_that_comes_back_with_another_key_or_bucket_is_refused(cluster, change):
    a = cluster.island("a")
    a.leave()
    if change == "key":
        a.signing = PublishingIsland(cluster, "other").signing
    else:
        a.bucket = "other"

    refused(cluster, a, "both stay for the whole run")


def test_key_is_refused_where_nobody_publishes(tmp_path, cluster):
    plain = Cluster(tmp_path / "plain")
    told = {"key": PublishingIsland(cluster, "a").signing.public.hex, "bucket": "main"}

    with pytest.raises(ConfigError, match="nobody publishes in this run"):
        plain.coordinator.register(HandIsland(plain, "a").register_request(publishes=told))
    plain.close()
