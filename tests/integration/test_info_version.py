"""Which manifest a worker is told of: the one in force, or the version whose hash it names."""

from collections.abc import Iterator

import httpx
import pytest

from atoll.coordinator.planes.access import Role
from atoll.errors import ManifestMismatch
from atoll.protocol.messages import InfoRequest
from tests import served
from tests.served import TOKENS, Served


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run of two versions, the second recorded while round 1 is open."""
    with served.serving(tmp_path_factory.mktemp("info") / "state") as running:
        worker = running.worker("alice")
        assert worker.assignment().round == 1
        running.coordinator.set_outer_lr(0.25)
        yield running


def test_round_that_is_open_keeps_its_version_in_force(coordinator):
    manifests = coordinator.coordinator.manifests
    first, second = manifests.first, manifests.newest

    assert (first.version, second.version) == (1, 2)
    assert coordinator.link().send(InfoRequest()).manifest_sha256 == first.sha256


def test_every_version_is_told_by_its_hash(coordinator):
    manifests = coordinator.coordinator.manifests

    told = [
        coordinator.link().send(InfoRequest(manifest=version.sha256))
        for version in (manifests.first, manifests.newest)
    ]

    assert [info.manifest() for info in told] == [
        manifests.first.manifest,
        manifests.newest.manifest,
    ]
    assert [info.manifest_sha256 for info in told] == [
        manifests.first.sha256,
        manifests.newest.sha256,
    ]
    assert told[1].outer.lr == 0.25 != told[0].outer.lr


def test_hash_of_no_version_is_refused_by_name(coordinator):
    with pytest.raises(ManifestMismatch, match=f"manifest='{'f' * 64}' is no version of this run"):
        coordinator.link().send(InfoRequest(manifest="f" * 64))


@pytest.mark.parametrize("said", ["zz", "F" * 64, "0" * 63])
def test_what_is_no_hash_is_refused(coordinator, said):
    answer = httpx.get(
        f"{coordinator.url}/info",
        params={"manifest": said},
        headers={"authorization": f"Bearer {TOKENS[Role.WORKER]}"},
        trust_env=False,
    )

    assert answer.status_code == 422, answer.text
    assert "manifest" in answer.text
