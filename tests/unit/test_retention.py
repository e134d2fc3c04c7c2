"""What is kept and what goes: never a blob that a record or an upload needs."""

import hashlib

import pytest

from atoll.blobs.memory import MemoryBlobs
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    ManifestRecord,
    Published,
    RoundPlan,
    RunRecord,
    SnapshotRecord,
)
from atoll.proof import retention
from atoll.protocol.manifest import StorageSettings
from tests import ledgers
from tests.ledgers import alone

MANIFEST = hashlib.sha256(b"{}").hexdigest()
ALL = StorageSettings(retain="all")
PRUNED = StorageSettings(retain="snapshots", keep_snapshots=2)


class Bench:
    """A ledger of six rounds of one worker, snapshots of rounds 2, 4 and 6, and their blobs."""

    def __init__(self) -> None:
        self.ledger: Ledger = engines.open_ledger(":memory:")
        self.blobs = MemoryBlobs()
        self.names: dict[str, str] = {}
        alone(self.ledger).run.create(
            RunRecord("run", 0.0, self.blob("initial")), ManifestRecord(1, MANIFEST, "{}", 1)
        )
        alone(self.ledger).members.register("a", "key", wall=0.0)
        ledgers.begin(self.ledger, self.plan(1))
        for number in range(1, 7):
            alone(self.ledger).contributions.accept(self.contribution(number))
            ledgers.freeze(self.ledger, number, self.plan(number + 1))
            ledgers.publish(self.ledger, number, Published("", "", "", "", b"", None, 0.0))
        for version in (2, 4, 6):
            alone(self.ledger).snapshots.add(
                SnapshotRecord(
                    version,
                    self.blob(f"master {version}"),
                    self.blob(f"published {version}"),
                    (("momentum", self.blob(f"momentum {version}")),),
                )
            )

    def plan(self, number: int) -> RoundPlan:
        lease = LeaseRecord(number, "a", number, number + 1)
        return RoundPlan(number, MANIFEST, number + 1, (lease,))

    def blob(self, label: str) -> str:
        writer = self.blobs.writer()
        writer.write(label.encode())
        self.names[label] = writer.commit().sha256
        return self.names[label]

    def contribution(self, number: int) -> ContributionRecord:
        sha256 = self.blob(f"contribution {number}")
        return ledgers.contribution(round=number, sha256=sha256)

    def kept(self) -> set[str]:
        stored = {ref.sha256 for ref in self.blobs.stored()}
        return {label for label, sha256 in self.names.items() if sha256 in stored}


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.ledger.close()


def snapshot(version: int) -> set[str]:
    return {f"{part} {version}" for part in ("master", "published", "momentum")}


def test_all_keeps_every_referenced_blob(bench):
    before = bench.kept()

    removed = retention.prune(bench.ledger, bench.blobs, ALL)

    assert removed == 0
    assert bench.kept() == before
    assert [s.version for s in alone(bench.ledger).snapshots.all()] == [2, 4, 6]


def test_all_removes_what_nothing_references(bench):
    bench.blob("left by a crash")

    removed = retention.prune(bench.ledger, bench.blobs, ALL)

    assert removed == 1
    assert "left by a crash" not in bench.kept()


def test_snapshots_keeps_what_replay_from_the_oldest_kept_one_needs(bench):
    retention.prune(bench.ledger, bench.blobs, PRUNED)

    assert bench.kept() == {
        "initial",
        *snapshot(4),
        *snapshot(6),
        "contribution 5",
        "contribution 6",
    }
    assert [s.version for s in alone(bench.ledger).snapshots.all()] == [4, 6]


def test_snapshots_keeps_so_many_as_it_is_told(bench):
    retention.prune(
        bench.ledger, bench.blobs, StorageSettings(retain="snapshots", keep_snapshots=1)
    )

    assert bench.kept() == {"initial", *snapshot(6)}


def test_blob_shared_by_a_dropped_and_a_kept_record_stays(bench):
    """Equal weights have equal names: a snapshot may share its blob with another record."""
    shared = SnapshotRecord(7, bench.names["master 2"], bench.names["master 2"], ())
    alone(bench.ledger).snapshots.add(shared)

    retention.prune(
        bench.ledger, bench.blobs, StorageSettings(retain="snapshots", keep_snapshots=1)
    )

    assert "master 2" in bench.kept()


def test_blob_in_flight_is_not_garbage(bench):
    sha256 = bench.blob("stored and not recorded yet")

    removed = retention.prune(bench.ledger, bench.blobs, ALL, in_flight=lambda: frozenset({sha256}))

    assert removed == 0
    assert "stored and not recorded yet" in bench.kept()


def test_blob_recorded_while_pruning_is_kept(bench):
    """It leaves `in_flight` only after the ledger has it, so one of the two answers names it."""
    record = bench.contribution(7)

    def in_flight() -> frozenset[str]:
        alone(bench.ledger).contributions.accept(
            record
        )  # recorded between this answer and the reading of the records
        return frozenset()

    retention.prune(bench.ledger, bench.blobs, ALL, in_flight=in_flight)

    assert "contribution 7" in bench.kept()


def test_blob_stored_while_pruning_is_kept(bench):
    """The listing is taken first: what comes after it is not looked at."""

    def in_flight() -> frozenset[str]:
        bench.blob("stored after the listing")
        return frozenset()

    retention.prune(bench.ledger, bench.blobs, ALL, in_flight=in_flight)

    assert "stored after the listing" in bench.kept()


def test_ledger_forgets_a_snapshot_before_its_blobs_go(bench, monkeypatch):
    """A crash between the two leaves garbage, never a record without its blob."""

    def crash(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.blobs, "delete", crash)

    with pytest.raises(KeyboardInterrupt):
        retention.prune(bench.ledger, bench.blobs, PRUNED)

    assert [s.version for s in alone(bench.ledger).snapshots.all()] == [4, 6]
    assert bench.kept() >= snapshot(4) | snapshot(6)


@pytest.mark.parametrize(("storage", "start"), [(ALL, 0), (PRUNED, 2)])
def test_replay_starts_at_the_oldest_kept_snapshot_only_where_others_were_pruned(
    bench, storage, start
):
    assert retention.replay_start(alone(bench.ledger), storage) == start


def test_replay_starts_at_the_initial_weights_without_a_snapshot(bench):
    alone(bench.ledger).snapshots.drop_below(100)

    assert retention.replay_start(alone(bench.ledger), PRUNED) == 0
