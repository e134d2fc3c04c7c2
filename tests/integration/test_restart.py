"""The ledger is the model: end the coordinator anywhere, open it again, and nothing has changed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.coordinator.accept.uploads import Upload, Uploads
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.stores import Stores
from atoll.errors import BlobChanged, BlobMissing, ConfigError, StateDamaged, VersionMismatch
from atoll.ledger import engines
from atoll.ledger.records import LeaseRecord
from atoll.proof import retention, soundness
from atoll.versions import recorded
from tests import clusters
from tests.clusters import Cluster, HandIsland
from tests.ledgers import alone
from tests.stored import is_stored

ROUNDS = 3
MODEL = {"architecture": "gpt", "vocab": 16, "block": 4, "layers": 1, "heads": 1, "width": 8}
DATA = {
    "kind": "synthetic",
    "seed": 1,
    "rows": 100,
    "held_out_rows": 2,
    "block": 4,
    "vocab": 16,
}


# Every stage of a round


def after_begin(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    cluster.restart()
    a.contribute()
    b.contribute()


def after_one_accept(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    a.contribute()
    cluster.restart()
    b.contribute()


def during_an_upload(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    sent = a.frame()
    a.begin(sent, sent.data[:2000])
    cluster.restart()
    assert cluster.drafts() == []
    a.send(sent)
    b.contribute()


def after_a_blob_before_its_record(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    sent = a.frame()
    writer = cluster.blobs.writer()
    writer.write(sent.data)
    writer.commit()
    cluster.restart()
    a.send(sent)
    b.contribute()


def after_both_accepts(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    a.contribute()
    b.contribute()
    cluster.restart()


def after_the_freeze(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    after_both_accepts(cluster, a, b)
    cluster.freeze()
    cluster.restart()


def after_the_outer_step(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    a.contribute()
    b.contribute()
    frozen = cluster.freeze()
    cluster.coordinator.weights.compute(frozen[0].round, frozen)
    cluster.restart()


def after_publish(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    a.contribute()
    b.contribute()
    cluster.settle()
    cluster.restart()


def without_snapshot_of_the_round(cluster: Cluster, a: HandIsland, b: HandIsland) -> None:
    """A crash between publish and snapshot."""
    a.contribute()
    b.contribute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshots, "published", lambda *_, **__: None)
        cluster.settle()
    cluster.restart()


STAGES: list[Callable[[Cluster, HandIsland, HandIsland], None]] = [
    after_begin,
    after_one_accept,
    during_an_upload,
    after_a_blob_before_its_record,
    after_both_accepts,
    after_the_freeze,
    after_the_outer_step,
    after_publish,
    without_snapshot_of_the_round,
]

SETTINGS: dict[str, dict[str, Any]] = {
    "no snapshot": {"storage.snapshot_every": 100},
    "pruned": {
        "storage.snapshot_every": 1,
        "storage.retain": "snapshots",
        "storage.keep_snapshots": 1,
    },
    "lossy": {"storage.snapshot_every": 2, "download.codec": "int8", "upload.codec": "bf16"},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cluster]:
    """The same rounds in a life that was never ended, for each of the settings."""
    made = {}
    for name, settings in SETTINGS.items():
        cluster = Cluster(tmp_path_factory.mktemp("undisturbed"), settings)
        cluster.rounds(ROUNDS, *cluster.pair())
        made[name] = cluster
    return made


# Every stage where θ̂ differs from θ; elsewhere the stages that read what the setting leaves.
CASES = [("lossy", stage) for stage in STAGES] + [
    (name, stage)
    for name in ("no snapshot", "pruned")
    for stage in (after_one_accept, after_the_freeze, after_publish, without_snapshot_of_the_round)
]


@pytest.mark.parametrize(
    ("name", "stage"), CASES, ids=[f"{stage.__name__}, {name}" for name, stage in CASES]
)
def test_restart_at_any_stage_changes_nothing(tmp_path, undisturbed, stage, name):
    """Digests, leases and the rows that come next are those of an undisturbed run."""
    cluster = Cluster(tmp_path, SETTINGS[name])
    a, b = cluster.pair()

    for _ in range(ROUNDS):
        stage(cluster, a, b)
        cluster.settle()

    control = undisturbed[name]
    assert cluster.version == ROUNDS
    assert cluster.digests_by_round() == control.digests_by_round()
    assert cluster.published_digest == control.published_digest
    assert rows_of(cluster) == rows_of(control)
    asked = HandIsland(control, "a").join().assignment()  # each case joins the control once more
    assert a.assignment() == asked.model_copy(update={"generation": 2})
    assert cluster.audit(with_replay=True).problems == []


def rows_of(cluster: Cluster) -> list[LeaseRecord]:
    """The leases, whichever life of its worker holds one: the control's islands join again."""
    return [replace(lease, lease_epoch=1, incarnation=1) for lease in cluster.leases()]


def test_tokens_of_the_run_survive_a_restart_after_the_freeze(tmp_path):
    """The learning rate follows them."""
    cluster = Cluster(tmp_path)
    a, b = cluster.pair()

    after_the_freeze(cluster, a, b)
    cluster.settle()

    assert a.assignment().global_tokens == 48


def test_receipt_survives_a_restart(tmp_path):
    """The reply was lost because the coordinator went down."""
    cluster = Cluster(tmp_path)
    a, _ = cluster.pair()
    sent = a.frame()
    first = a.send(sent)

    cluster.restart()

    assert a.send(sent) == first


def test_finished_run_is_finished_after_a_restart(tmp_path):
    cluster = Cluster(tmp_path, {"stop.rounds": 1})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    cluster.restart()

    assert cluster.coordinator.is_finished()
    assert a.assignment().action == "stop"


def test_late_joiner_after_a_restart_gets_the_published_weights(tmp_path):
    """The download is lossy, so the published weights are not the master."""
    cluster = Cluster(tmp_path, SETTINGS["lossy"])
    cluster.rounds(3, *cluster.pair())
    before = cluster.published_digest
    cluster.restart()
    late = clusters.TrackingIsland(cluster, "late").join()

    late.fetch()

    assert late.weights.digest == cluster.published_digest == before != cluster.digest


def test_workers_have_a_full_timeout_after_a_restart(tmp_path):
    """Nobody is taken for dead because the coordinator was away."""
    cluster = Cluster(tmp_path)
    a, _ = cluster.pair()
    a.contribute()
    cluster.clock.advance(seconds=1000)

    cluster.restart()

    assert cluster.coordinator.members() == ["a", "b"]


# Damage


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Cluster]:
    """Five rounds with a snapshot of round 3."""
    cluster = Cluster(tmp_path, {"storage.snapshot_every": 3})
    cluster.rounds(5, *cluster.pair())
    yield cluster
    cluster.close()


def test_changed_contribution_is_named_with_its_round(stopped):
    record = alone(stopped.ledger).contributions.of_round(5)[1]
    clusters.flip_byte(stopped.blob_path(record.sha256), 3000)

    with pytest.raises(BlobChanged) as refused:
        stopped.restart()

    assert "a contribution of round 5" in str(refused.value)
    assert record.sha256 in str(refused.value)


def test_missing_contribution_is_named_with_its_round(stopped):
    record = alone(stopped.ledger).contributions.of_round(4)[0]
    stopped.blob_path(record.sha256).unlink()

    with pytest.raises(BlobMissing) as refused:
        stopped.restart()

    assert "a contribution of round 4" in str(refused.value)
    assert record.sha256 in str(refused.value)


@pytest.mark.parametrize("part", ["master", "momentum"])
def test_changed_snapshot_is_named_with_its_version(stopped, part):
    [snapshot] = alone(stopped.ledger).snapshots.all()
    sha256 = snapshot.master_sha256 if part == "master" else dict(snapshot.slots_sha256)[part]
    clusters.flip_byte(stopped.blob_path(sha256), 5000)

    with pytest.raises(BlobChanged, match="the snapshot of version 3") as refused:
        stopped.restart()

    assert sha256 in str(refused.value)


def restore(cluster: Cluster) -> None:
    """Restores the weights as a start does, after the seals, which tell of any tampering first."""
    [snapshot] = alone(cluster.ledger).snapshots.all()
    replay = cluster.replay()
    replay.follow(replay.restore(snapshot))


def test_snapshot_of_other_weights_is_refused(stopped):
    """A whole blob, but not the one that the chain stands for."""
    run = alone(stopped.ledger).run.get()
    assert run is not None
    clusters.tamper(stopped.ledger, "snapshots", {"version": 3}, master_sha256=run.initial_sha256)

    with pytest.raises(StateDamaged, match=r"snapshot of version 3 .*tensor 'embedding'"):
        restore(stopped)


def test_snapshot_with_other_momentum_is_refused_by_the_round_after_it(stopped):
    [snapshot] = alone(stopped.ledger).snapshots.all()
    clusters.tamper(
        stopped.ledger,
        "snapshots",
        {"version": 3},
        slots_sha256=f'[["momentum","{snapshot.master_sha256}"]]',
    )

    with pytest.raises(StateDamaged, match=r"replay of round 4 .*the last good round is 3"):
        restore(stopped)


def test_changed_initial_weights_are_refused(tmp_path):
    cluster = Cluster(tmp_path)
    run = alone(cluster.ledger).run.get()
    assert run is not None
    clusters.flip_byte(cluster.blob_path(run.initial_sha256), 4000)

    with pytest.raises(BlobChanged):
        cluster.restart()


def test_recorded_digest_that_replay_does_not_give_is_refused(stopped):
    clusters.tamper(stopped.ledger, "rounds", {"round": 5}, master_digest="f" * 64)

    with pytest.raises(StateDamaged, match=r"replay of round 5 .*the last good round is 4"):
        restore(stopped)


def test_damage_before_the_newest_snapshot_does_not_stop_the_run(stopped):
    """Snapshots save time; audit still finds it."""
    record = alone(stopped.ledger).contributions.of_round(1)[0]
    clusters.flip_byte(stopped.blob_path(record.sha256), 3000)

    stopped.restart()

    assert stopped.version == 5
    assert [p.round for p in stopped.audit().problems] == [1]


# Snapshots and garbage


def test_snapshot_is_taken_every_so_many_rounds_and_at_the_end(tmp_path):
    cluster = Cluster(tmp_path, {"storage.snapshot_every": 2, "stop.rounds": 5})

    cluster.rounds(5, *cluster.pair())

    assert [s.version for s in alone(cluster.ledger).snapshots.all()] == [2, 4, 5]


def test_retention_keeps_the_newest_snapshots_and_what_follows_the_oldest(tmp_path):
    cluster = Cluster(
        tmp_path,
        {
            "storage.snapshot_every": 2,
            "storage.retain": "snapshots",
            "storage.keep_snapshots": 2,
        },
    )
    cluster.rounds(7, *cluster.pair())

    kept = [s.version for s in alone(cluster.ledger).snapshots.all()]
    held = [
        number
        for number in range(1, 8)
        if all(
            is_stored(cluster.blobs, c.sha256)
            for c in alone(cluster.ledger).contributions.of_round(number)
        )
    ]

    assert kept == [4, 6]
    assert held == [5, 6, 7]


def test_retention_all_keeps_every_contribution(tmp_path):
    cluster = Cluster(tmp_path, {"storage.snapshot_every": 2, "storage.retain": "all"})

    cluster.rounds(5, *cluster.pair())

    names = {c.sha256 for n in range(1, 6) for c in alone(cluster.ledger).contributions.of_round(n)}
    assert names <= cluster.blob_names()


def test_blob_between_store_and_record_survives_garbage_collection(tmp_path, monkeypatch):
    """The moment in which only the upload knows that the blob is wanted."""
    cluster = Cluster(tmp_path)
    a, _ = cluster.pair()
    commit, finish = Uploads.commit, Upload.finish
    removed: list[int] = []
    under_way: list[Uploads] = []

    def noting(self, stream):
        under_way.append(self)
        return commit(self, stream)

    def collecting(self):
        norm = finish(self)
        removed.append(
            retention.prune(
                cluster.ledger,
                cluster.blobs,
                cluster.manifest.storage,
                in_flight=under_way[0].in_flight,
            )
        )
        return norm

    monkeypatch.setattr(Uploads, "commit", noting)
    monkeypatch.setattr(Upload, "finish", collecting)

    accepted = a.contribute()

    assert removed == [0]
    assert is_stored(cluster.blobs, accepted.sha256)
    assert under_way[0].in_flight() == frozenset()


def test_blob_between_store_and_record_is_garbage_to_who_does_not_ask(tmp_path, monkeypatch):
    """The control of the claim above."""
    cluster = Cluster(tmp_path)
    a, _ = cluster.pair()
    finish = Upload.finish

    def collecting(self):
        norm = finish(self)
        retention.prune(cluster.ledger, cluster.blobs, cluster.manifest.storage)
        return norm

    monkeypatch.setattr(Upload, "finish", collecting)

    accepted = a.contribute()

    assert not is_stored(cluster.blobs, accepted.sha256)


# Opening a run again


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = clusters.stores_in(tmp_path)
    yield made
    made.ledger.close()


def run_file(**changes):
    return clusters.run_file({"model": MODEL, "data": DATA, **changes})


def test_same_run_file_opens_the_same_run(stores):
    first = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")

    again = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="two")
    coordinator = boot.open_coordinator(stores, ManualClock())

    assert again == first
    assert coordinator.run_id == "one"
    assert coordinator.weights.current.digests.master.root == first.model.initial_digest


def test_changed_run_file_is_refused_with_the_fields_that_differ(stores):
    """Settings are stored with the run."""
    boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    before = stores.ledger.state_hash()

    with pytest.raises(ConfigError) as refused:
        boot.create_or_check(
            stores,
            run_file(sync_every=9, model={**MODEL, "width": 16}, data={**DATA, "rows": 200}),
            ManualClock(),
            new_run_id="two",
        )

    for line in (
        "sync_every: 2 -> 9",
        "model.definition.width: 8 -> 16",
        "data.definition.rows: 100 -> 200",
        "data.identity.rows: 100 -> 200",
    ):
        assert line in str(refused.value)
    assert stores.ledger.state_hash() == before


def test_initial_weights_depend_on_the_seed_and_nothing_else(tmp_path):
    found = []
    for index, seed in enumerate((1, 1, 2)):
        stores = Stores(
            engines.open_ledger(":memory:"),
            DirectoryBlobs(tmp_path / str(index)),
            Spool(tmp_path / f"spool {index}"),
        )
        manifest = boot.create_or_check(
            stores, run_file(seed=seed), ManualClock(float(index)), new_run_id=f"run-{index}"
        )
        found.append(manifest.model.initial_digest)

    assert found[0] == found[1] != found[2]


def test_recorded_manifest_that_breaks_a_rule_is_named(stores):
    manifest = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    body = manifest.body().replace('"sync_every":2', '"sync_every":0')
    clusters.tamper(stores.ledger, "manifests", {"version": 1}, body=body)

    with pytest.raises(StateDamaged, match="breaks a rule at 'sync_every'"):
        recorded.manifest_of(stores.ledger)


def test_recorded_manifest_of_a_newer_protocol_is_refused(stores):
    manifest = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    body = manifest.body().replace('"protocol_version":1', '"protocol_version":2')
    clusters.tamper(stores.ledger, "manifests", {"version": 1}, body=body)

    with pytest.raises(VersionMismatch):
        recorded.manifest_of(stores.ledger)


def test_model_that_builds_to_another_layout_is_refused(stores):
    """A program whose model code changed cannot continue the run unnoticed."""
    manifest = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    changed = manifest.model_copy(
        update={"model": manifest.model.model_copy(update={"layout_digest": "f" * 64})}
    )
    clusters.tamper(stores.ledger, "manifests", {"version": 1}, body=changed.body())

    with pytest.raises(ConfigError, match="use the version of atoll that created the run"):
        boot.open_coordinator(stores, ManualClock())


def test_damaged_state_is_opened_by_nobody(stores):
    """Also by whoever has not asked for the run file to be compared, which looks as well."""
    manifest = boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    body = manifest.body().replace('"seed":0', '"seed":1')
    clusters.tamper(stores.ledger, "manifests", {"version": 1}, body=body)

    with pytest.raises(StateDamaged, match="table 'manifests'"):
        boot.open_coordinator(Stores(stores.ledger, stores.blobs, stores.spool), ManualClock())


def test_state_is_looked_at_once_at_a_start(stores, monkeypatch):
    looked = []
    monkeypatch.setattr(soundness, "check_start", lambda *state: looked.append(state))

    boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    boot.open_coordinator(stores, ManualClock())

    assert looked == [(stores.ledger, stores.blobs)]


def test_run_file_is_checked_without_the_weights_it_started_from(stores, tmp_path):
    """`start_from` is a place on one machine; the digest it gave is in the manifest."""
    boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    moved = replace(run_file(), start_from=tmp_path / "gone.safetensors")

    assert boot.create_or_check(stores, moved, ManualClock(), new_run_id="two")
