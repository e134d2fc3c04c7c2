"""Weights in and out of a run as safetensors files."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.stores import Stores
from atoll.errors import ConfigError, LayoutMismatch, StateDamaged, StoreError
from atoll.ledger import engines
from atoll.models import registry as models
from atoll.proof import export as exporting
from atoll.sums import digest as digests
from atoll.versions import recorded, weights_file
from tests import clusters
from tests.clusters import SMALL, Cluster
from tests.integration.test_restart import run_file
from tests.ledgers import alone


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Five rounds with snapshots of rounds 2 and 4, and a lossy download."""
    made = Cluster(
        tmp_path_factory.mktemp("export"),
        {"storage.snapshot_every": 2, "download.codec": "bf16"},
    )
    made.rounds(5, *made.pair())
    yield made
    made.close()


def exported(cluster: Cluster, path: Path, **options) -> dict[str, str]:
    return exporting.export(
        cluster.ledger,
        cluster.blobs,
        path,
        layout=cluster.layout,
        **options,
    )


def digest_of(path: Path) -> str:
    """The params digest of a file, read by a tool that knows nothing of Atoll."""
    named = load_file(str(path))
    flat = torch.cat([named[spec.name].flatten() for spec in SMALL.tensors])
    return digests.digest(SMALL, flat).root


@pytest.mark.parametrize("version", range(1, 6))
def test_export_of_a_round_is_what_the_ledger_recorded(cluster, tmp_path, version):
    """From a snapshot, from between two, and after the last."""
    metadata = exported(cluster, tmp_path / "out.safetensors", version=version)

    recorded_digest = cluster.digests_by_round()[version - 1]
    assert digest_of(tmp_path / "out.safetensors") == recorded_digest
    assert (metadata["atoll.digest"], metadata["atoll.round"]) == (recorded_digest, str(version))


def test_export_of_version_zero_is_the_initial_weights(cluster, tmp_path):
    exported(cluster, tmp_path / "out.safetensors", version=0)

    assert digest_of(tmp_path / "out.safetensors") == cluster.manifest.model.initial_digest


def test_export_is_the_newest_master_by_default(cluster, tmp_path):
    metadata = exported(cluster, tmp_path / "out.safetensors")

    assert metadata["atoll.weights"] == "master"
    assert digest_of(tmp_path / "out.safetensors") == cluster.digest


def test_export_of_the_published_weights_says_so(cluster, tmp_path):
    metadata = exported(cluster, tmp_path / "out.safetensors", published=True)

    assert metadata["atoll.weights"] == "published"
    assert metadata["atoll.digest"] == cluster.published_digest
    assert digest_of(tmp_path / "out.safetensors") == cluster.published_digest != cluster.digest


def test_digest_is_in_the_files_metadata(cluster, tmp_path):
    exported(cluster, tmp_path / "out.safetensors")

    with safe_open(str(tmp_path / "out.safetensors"), "pt") as file:
        assert file.metadata() == {
            "atoll.run": clusters.RUN_ID,
            "atoll.round": "5",
            "atoll.weights": "master",
            "atoll.digest": cluster.digest,
        }


def test_export_keeps_names_and_shapes(cluster, tmp_path):
    exported(cluster, tmp_path / "out.safetensors")

    found = {
        name: tuple(t.shape) for name, t in load_file(str(tmp_path / "out.safetensors")).items()
    }

    assert found == {spec.name: spec.shape for spec in SMALL.tensors}


def test_export_leaves_no_part_behind(cluster, tmp_path):
    exported(cluster, tmp_path / "out.safetensors")

    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_export_into_a_missing_directory_is_refused_by_its_name(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"'.*absent', which is not a directory"):
        exported(cluster, tmp_path / "absent" / "out.safetensors")


def test_export_without_room_is_refused_and_leaves_no_part_behind(cluster, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    try:
        with pytest.raises(StoreError, match="cannot write weights to"):
            exported(cluster, tmp_path / "out.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert list(tmp_path.iterdir()) == []


def test_export_is_on_the_disk_before_it_has_its_name(cluster, tmp_path, monkeypatch):
    """Only the order of the calls can be seen without cutting the power."""
    target, named = tmp_path / "out.safetensors", []
    fsync = os.fsync

    def recorded_fsync(fd: int) -> None:
        named.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, target.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded_fsync)

    exported(cluster, target)

    assert ("out.safetensors.part", False) in named


@pytest.mark.parametrize("version", [-1, 6])
def test_round_that_is_not_there_is_refused_with_those_that_are(cluster, tmp_path, version):
    with pytest.raises(ConfigError, match=r"can export rounds 0 to 5"):
        exported(cluster, tmp_path / "out.safetensors", version=version)

    assert list(tmp_path.iterdir()) == []


def test_pruned_round_is_refused_with_those_that_are_kept(tmp_path):
    cluster = Cluster(
        tmp_path / "run", {"storage.snapshot_every": 2, "storage.retain": "snapshots"}
    )
    cluster.rounds(6, *cluster.pair())

    with pytest.raises(ConfigError, match=r"round=3 is not kept; .* rounds 4 to 6"):
        exported(cluster, tmp_path / "out.safetensors", version=3)


def test_export_refuses_a_snapshot_of_other_weights(tmp_path):
    cluster = Cluster(tmp_path / "run", {"storage.snapshot_every": 2})
    cluster.rounds(2, *cluster.pair())
    run = alone(cluster.ledger).run.get()
    assert run is not None
    clusters.tamper(cluster.ledger, "snapshots", {"version": 2}, master_sha256=run.initial_sha256)

    with pytest.raises(StateDamaged, match="snapshot of version 2"):
        exported(cluster, tmp_path / "out.safetensors")

    assert not (tmp_path / "out.safetensors").exists()


def test_export_refuses_a_round_that_replays_to_other_bits(tmp_path):
    cluster = Cluster(tmp_path / "run")
    cluster.rounds(2, *cluster.pair())
    clusters.tamper(cluster.ledger, "contributions", {"round": 2, "worker_id": "a"}, weight=2)

    with pytest.raises(StateDamaged, match="replay of round 2 gives other bits"):
        exported(cluster, tmp_path / "out.safetensors")


# Starting from a file


def stores_in(path: Path) -> Stores:
    return Stores(
        engines.open_ledger(":memory:"), DirectoryBlobs(path / "blobs"), Spool(path / "spool")
    )


def tensors() -> dict[str, torch.Tensor]:
    """Weights for the run file's model."""
    layout = models.layout_of(models.on_meta(run_file().model))
    flat = clusters.values(layout, "from a file")
    return {name: view.clone() for name, view in layout.views(flat).items()}


def start(tmp_path: Path, named: dict[str, torch.Tensor]):
    save_file(named, str(tmp_path / "start.safetensors"))
    stores = stores_in(tmp_path)
    file = run_file(**{"model.start_from": str(tmp_path / "start.safetensors")})
    manifest = boot.create_or_check(stores, file, ManualClock(), new_run_id="one")
    return stores, manifest


def test_run_starts_from_the_files_weights(tmp_path):
    named = tensors()
    stores, manifest = start(tmp_path, named)

    coordinator = boot.open_coordinator(stores, ManualClock())

    flat = torch.cat([tensor.flatten() for tensor in named.values()])
    expected = digests.digest(recorded.layout_of(manifest), flat).root
    current = coordinator.weights.current
    assert (current.version, current.digests.master.root) == (0, expected)
    assert manifest.model.initial_digest == expected


def test_run_starts_from_what_another_run_exported(tmp_path):
    stores, manifest = start(tmp_path, tensors())
    layout = recorded.layout_of(manifest)
    exporting.export(stores.ledger, stores.blobs, tmp_path / "out.safetensors", layout=layout)

    flat = weights_file.read(tmp_path / "out.safetensors", layout)

    assert digests.digest(layout, flat).root == manifest.model.initial_digest


def test_lower_precision_is_widened_exactly(tmp_path):
    named = {name: tensor.bfloat16() for name, tensor in tensors().items()}

    _, manifest = start(tmp_path, named)

    flat = torch.cat([tensor.float().flatten() for tensor in named.values()])
    assert digests.digest(recorded.layout_of(manifest), flat).root == manifest.model.initial_digest


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_file_that_is_not_finite_is_refused_by_the_tensors_name(tmp_path, value):
    named = tensors()
    named["positions.weight"][2, 3] = value

    with pytest.raises(ConfigError, match=r"start\.safetensors.*in tensor 'positions\.weight'"):
        start(tmp_path, named)


def test_file_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    named = tensors()
    del named["norm.weight"]

    with pytest.raises(LayoutMismatch, match=r"lacks tensor 'norm\.weight'"):
        start(tmp_path, named)


def test_file_with_an_unknown_tensor_is_refused_by_its_name(tmp_path):
    with pytest.raises(LayoutMismatch, match=r"has an unknown tensor 'norm\.bias'"):
        start(tmp_path, {**tensors(), "norm.bias": torch.zeros(8)})


def test_file_with_another_shape_is_refused_by_the_tensors_name(tmp_path):
    named = tensors()
    named["head.weight"] = named["head.weight"].T.contiguous()

    with pytest.raises(LayoutMismatch, match=r"'head\.weight' with shape \(8, 16\)"):
        start(tmp_path, named)


def test_refused_file_leaves_no_run_behind(tmp_path):
    stores = stores_in(tmp_path)
    file = run_file(**{"model.start_from": str(tmp_path / "absent.safetensors")})

    with pytest.raises(ConfigError, match=r"cannot read weights from .*absent\.safetensors"):
        boot.create_or_check(stores, file, ManualClock(), new_run_id="one")

    assert alone(stores.ledger).run.get() is None


def test_file_that_is_no_safetensors_is_refused_by_its_name(tmp_path):
    (tmp_path / "start.safetensors").write_bytes(b"\x80\x04pickle" * 10)
    file = run_file(**{"model.start_from": str(tmp_path / "start.safetensors")})

    with pytest.raises(ConfigError, match=r"cannot read weights from .*start\.safetensors"):
        boot.create_or_check(stores_in(tmp_path), file, ManualClock(), new_run_id="one")
