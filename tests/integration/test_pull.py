"""Contributions pulled from buckets: accepted as any other, or the round goes on without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.publishing import GatherCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatherCluster]:
    made = GatherCluster(tmp_path)
    yield made
    made.close()


def test_announced_contribution_is_pulled_and_gets_its_receipt(cluster):
    a, b = cluster.islands("ab")

    receipts = {a.contribute_by_pull().receipt, b.contribute_by_pull().receipt}

    assert len(receipts) == 2 and "" not in receipts
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []
