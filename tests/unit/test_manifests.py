"""Which of a run's manifest versions a round is under, which is in force, and which has a hash."""

import pytest

from atoll.errors import ManifestMismatch
from atoll.ledger import engines
from atoll.ledger.records import ManifestRecord, RoundPlan
from atoll.protocol.manifest import Manifest
from atoll.versions.manifests import Manifests
from tests.clusters import SMALL, manifest_for
from tests.ledgers import RUN, alone, begin


def record(version: int, *, from_round: int) -> ManifestRecord:
    made = manifest_for(SMALL, {"outer.lr": version / 10})
    made = made.model_copy(update={"manifest_version": version})
    return ManifestRecord(version, made.sha256(), made.body(), from_round=from_round)


RECORDS = [record(1, from_round=1), record(2, from_round=3), record(3, from_round=4)]


@pytest.fixture
def manifests() -> Manifests:
    return Manifests(RECORDS)


@pytest.mark.parametrize(
    ("round_number", "version"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3), (99, 3)]
)
def test_round_is_under_the_newest_version_from_it_or_before(manifests, round_number, version):
    assert manifests.of_round(round_number).version == version


def test_first_version_is_in_force_until_a_round_of_another_is_reached(manifests):
    found = [manifests.in_force.version]
    for number in (2, 3, 4):
        manifests.reach(number)
        found.append(manifests.in_force.version)

    assert found == [1, 1, 2, 3]


def test_version_that_is_recorded_is_in_force_once_a_round_after_the_planned_ones_is_reached():
    ledger = engines.open_ledger(":memory:")
    alone(ledger).run.create(RUN, RECORDS[0])
    begin(ledger, RoundPlan(1, RECORDS[0].sha256, cursor=0, leases=()))
    manifests = Manifests.of(ledger)

    manifests.record(ledger, Manifest.model_validate_json(RECORDS[1].body), layout=SMALL)
    before = manifests.in_force.version
    manifests.reach(2)

    assert (before, manifests.in_force.version, manifests.newest.from_round) == (1, 2, 2)
    assert Manifests.of(ledger).newest == manifests.newest


def test_version_is_found_by_its_hash(manifests):
    assert [manifests.get(r.sha256).version for r in RECORDS] == [1, 2, 3]
    assert manifests.find(RECORDS[1].sha256) == manifests.get(RECORDS[1].sha256)


def test_hash_of_no_version_is_refused_by_name(manifests):
    assert manifests.find("0" * 64) is None
    with pytest.raises(ManifestMismatch, match=f"manifest='{'0' * 64}' is no version"):
        manifests.get("0" * 64)


def test_round_is_answered_by_the_strategy_of_its_version_and_the_run_by_the_first(manifests):
    rates = [manifests.of_round(n).round_strategy.outer(n, 0).optimizer for n in (1, 3, 4)]

    assert rates == [manifests.get(r.sha256).manifest.outer.build() for r in RECORDS]
    assert manifests.run_strategy is manifests.first.round_strategy
