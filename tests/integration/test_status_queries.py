"""What is shown of a run costs as many questions to the ledger whatever its length."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ledgers
from tests.clusters import Cluster
from tests.ledgers import alone


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def questions(show: Callable[[], object]) -> int:
    with ledgers.listening() as sent:
        show()
    return len(sent)


def test_status_asks_no_more_after_many_rounds(cluster: Cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    status, work = cluster.coordinator.status, cluster.coordinator.work
    early = questions(status), questions(work)

    cluster.rounds(8, a, b)

    assert (questions(status), questions(work)) == early
    assert 0 < early[0] <= 5


def test_status_sums_what_each_round_folded(cluster: Cluster):
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    shown = {r.round: r for r in cluster.coordinator.status().history}

    assert sorted(shown) == [0, 1, 2]
    for number in (1, 2):
        folded = alone(cluster.ledger).contributions.of_round(number)
        tokens = sum(c.tokens for c in folded)
        assert (shown[number].contributions, shown[number].tokens) == (len(folded), tokens)
        assert shown[number].train_loss == pytest.approx(sum(c.loss_sum for c in folded) / tokens)
    assert (shown[0].contributions, shown[0].train_loss) == (0, None)
