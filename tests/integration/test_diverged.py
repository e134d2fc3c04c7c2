"""An outer step that overflows is not published; contributions that could do it are refused."""

import pytest
import torch

from atoll.coordinator.accept import uploads
from atoll.errors import ContributionError, Diverged
from atoll.ledger.records import RoundState
from atoll.optim.base import MAX_NORM
from tests.clusters import SMALL, Cluster, HandIsland
from tests.ledgers import alone

IN_HEAD = SMALL.size - 1


def large(value: float) -> torch.Tensor:
    delta = SMALL.zeros()
    delta[IN_HEAD] = value
    return delta


def give(value: float, *islands: HandIsland) -> None:
    for island in islands:
        island.contribute(large(value))


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the contributions came from a ledger that was written without the bound."""
    monkeypatch.setattr(uploads, "MAX_NORM", float("inf"))


OUTERS = {
    "sgd": ({"outer.optimizer": "sgd", "outer.lr": 100.0}, 3e38, "master"),
    # The weights stay finite; a second moment that is infinite would hold them still for ever.
    "adam": ({"outer.optimizer": "adam", "outer.lr": 0.1}, 3e37, "second_moment"),
}


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(("settings", "value", "where"), OUTERS.values(), ids=OUTERS)
def test_round_that_overflows_stays_frozen_and_names_the_tensor(tmp_path, settings, value, where):
    cluster = Cluster(tmp_path, settings)
    a, b = cluster.pair()
    before = cluster.published_digest
    give(value, a, b)

    with pytest.raises(Diverged, match=f"round 1 makes tensor 'head' of '{where}'"):
        cluster.settle()

    [frozen] = alone(cluster.ledger).rounds.all(last=1)
    assert frozen.state is RoundState.FROZEN
    assert (cluster.version, cluster.published_digest) == (0, before)
    cluster.restart()
    assert cluster.published_digest == before
    with pytest.raises(Diverged):
        cluster.settle()
    cluster.close()


@pytest.mark.parametrize(("settings", "_value", "_where"), OUTERS.values(), ids=OUTERS)
def test_largest_contribution_that_is_taken_is_published(tmp_path, settings, _value, _where):
    cluster = Cluster(tmp_path, {**settings, "weighting": "tokens"})
    a, b = cluster.pair()

    for _ in range(3):
        give(0.999 * MAX_NORM, a, b)
        assert cluster.settle() == 1

    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


def test_contribution_above_the_bound_is_refused_by_its_norm(tmp_path):
    cluster = Cluster(tmp_path)
    a, _ = cluster.pair()

    with pytest.raises(ContributionError, match=r"norm=2e\+18 .* is above 1e\+18"):
        a.contribute(large(2e18))

    assert alone(cluster.ledger).contributions.of_round(1) == []
    cluster.close()
