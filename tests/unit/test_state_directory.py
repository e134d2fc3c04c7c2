"""A coordinator's state directory: its stores stay where they were."""

import contextlib
import errno
import os
import shutil
import stat
import uuid
from pathlib import Path

import pytest

from atoll.blobs import owner
from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator.stores import Stores
from atoll.errors import (
    ConfigError,
    DiskFailed,
    StateDamaged,
    StateHeld,
    StorageFull,
    StoreError,
    Superseded,
)
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.ledger.sqlite import lock
from atoll.proof import soundness
from atoll.versions import weights
from tests import clusters, damages, lives, mounts, servers
from tests.ledgers import alone
from tests.lives import Place
from tests.stored import is_stored


def open_at(directory: Path, addresses: Addresses) -> None:
    with state.held(directory, addresses):
        pass


@pytest.mark.parametrize("name", ["ledger", "blobs"])
def test_store_that_moved_is_refused_by_its_setting(tmp_path, name):
    open_at(tmp_path / "c", Addresses())
    moved = Addresses(**{name: str(tmp_path / "elsewhere")})

    with pytest.raises(ConfigError, match=f"storage.{name} differs"):
        open_at(tmp_path / "c", moved)

    assert state.addresses_of(tmp_path / "c") == Addresses()


def test_addresses_are_readable_by_their_owner_only(tmp_path):
    open_at(tmp_path / "c", Addresses(blobs=str(tmp_path / "b")))

    mode = stat.S_IMODE((tmp_path / "c" / "stores.json").stat().st_mode)

    assert mode == 0o600


def test_new_run_is_refused_where_another_keeps_its_blobs(tmp_path):
    shared = Addresses(blobs=str(tmp_path / "b"))
    with state.held(tmp_path / "one", shared) as stores:
        writer = stores.blobs.writer()
        writer.write(b"of another run")
        writer.commit()

    with pytest.raises(ConfigError, match="already holds blobs"):
        open_at(tmp_path / "two", shared)


def test_directory_in_use_is_not_opened_twice(tmp_path):
    with (
        state.held(tmp_path, Addresses()),
        pytest.raises(StateHeld, match=f"process {os.getpid()} "),
    ):
        open_at(tmp_path, Addresses())


def test_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="not a coordinator's state directory"):
        state.addresses_of(tmp_path)


def store(stores: Stores, data: bytes) -> str:
    writer = stores.blobs.writer()
    writer.write(data)
    return writer.commit().sha256


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.s3)])
def outside(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Blobs outside the state directory."""
    if request.param == "directory":
        return Place(blobs=str(tmp_path / "b"))
    server = request.getfixturevalue("s3_server")
    return Place(
        blobs=f"s3://{servers.BUCKET}/owner-{uuid.uuid4().hex}", s3=lives.s3_access(server)
    )


def held(directory: Path, place: Place, *, adopt: bool = False):
    addresses = Addresses(blobs=place.blobs)
    return state.held(directory, addresses, s3=place.s3, adopt_blobs=adopt)


@pytest.fixture
def copied(tmp_path: Path, outside: Place) -> Path:
    """A copy of a run's directory whose blobs are elsewhere."""
    with held(tmp_path / "original", outside) as stores:
        sha256 = store(stores, b"initial")
        alone(stores.ledger).run.create(
            RunRecord("run", 0.0, sha256), ManifestRecord(1, "1" * 64, "{}", from_round=1)
        )
    return Path(shutil.copytree(tmp_path / "original", tmp_path / "copy"))


def test_copy_is_refused_where_the_original_keeps_its_blobs(copied: Path, outside: Place):
    with (
        pytest.raises(ConfigError, match=r"belongs to the ledger '.*original' on .*--adopt-blobs"),
        held(copied, outside),
    ):
        pass


def test_original_goes_on_where_it_keeps_its_blobs(copied: Path, outside: Place):
    with held(copied.parent / "original", outside) as stores:
        stores.blobs.delete(store(stores, b"garbage"))


def test_original_removes_nothing_once_a_copy_has_adopted_its_blobs(copied: Path, outside: Place):
    with held(copied.parent / "original", outside) as original:
        sha256 = store(original, b"known to the copy alone")
        with held(copied, outside, adopt=True) as adopted:
            with pytest.raises(Superseded, match=r"now belongs to the ledger '.*copy' on "):
                original.blobs.delete(sha256)

            assert is_stored(adopted.blobs, sha256)
            adopted.blobs.delete(sha256)

    with (
        pytest.raises(ConfigError, match="belongs to the ledger"),
        held(copied.parent / "original", outside),
    ):
        pass


def test_start_that_finds_no_room_adopts_no_blobs(
    copied: Path, outside: Place, monkeypatch: pytest.MonkeyPatch
):
    def full(_: Path) -> None:
        raise StorageFull("no room for the history of telemetry")

    with monkeypatch.context() as patched:
        patched.setattr(state, "SampleStore", full)
        with pytest.raises(StorageFull), held(copied, outside, adopt=True):
            pass

    with held(copied.parent / "original", outside) as stores:
        stores.blobs.delete(store(stores, b"garbage"))


def test_marker_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / owner.KEY).write_text("{")

    with pytest.raises(StoreError, match=r"owner\.json .* cannot be read"):
        open_at(tmp_path / "c", Addresses(blobs=str(tmp_path / "b")))


# A creation that was cut off


def initial_weights(stores: Stores) -> str:
    """What a creation stores before it records the run."""
    layout = clusters.SMALL
    flat = clusters.values(layout, "initial")
    header = weights.weights_header(
        layout, run_id="cut-off", manifest_sha256="1" * 64, version=0, digest="2" * 64
    )
    return weights.store(stores.blobs, header, flat, layout=layout)


def test_creation_that_was_cut_off_is_taken_up_where_its_blobs_are_elsewhere(
    tmp_path: Path, outside: Place
):
    with held(tmp_path / "one", outside) as stores:
        left = initial_weights(stores)

    with held(tmp_path / "one", outside) as again:
        soundness.check_start(again.ledger, again.blobs)

        assert alone(again.ledger).run.get() is None
        assert is_stored(again.blobs, left)


def test_what_another_directory_left_is_not_taken_up(tmp_path: Path, outside: Place):
    """The control: it is the name beside the blobs that lets a start go on."""
    with held(tmp_path / "one", outside) as stores:
        initial_weights(stores)

    with pytest.raises(ConfigError, match="already holds blobs"), held(tmp_path / "two", outside):
        pass


def test_lost_ledger_is_not_taken_for_a_creation_that_was_cut_off(tmp_path: Path, outside: Place):
    """Blobs of rounds stand beside this run's name, and its ledger knows none of them."""
    cluster = damages.play(tmp_path / "played")
    frame = cluster.blob_path(
        alone(cluster.ledger).contributions.of_round(3)[0].sha256
    ).read_bytes()
    cluster.close()
    with held(tmp_path / "one", outside) as stores:
        store(stores, frame)

    with (
        held(tmp_path / "one", outside) as again,
        pytest.raises(StateDamaged, match="records have been lost"),
    ):
        soundness.check_start(again.ledger, again.blobs)


# A directory that goes away under its holder


def move(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def delete(directory: Path) -> None:
    shutil.rmtree(directory)


def take_the_lock_file(directory: Path) -> None:
    (directory / lock.FILE_NAME).unlink()


def second_holder(directory: Path, happens: object) -> contextlib.AbstractContextManager[object]:
    """One that finds the place free; SQLite keeps it from a ledger that only lost its lock."""
    if happens is take_the_lock_file:
        return contextlib.nullcontext()
    return state.held(directory, Addresses())


@pytest.mark.parametrize("happens", [move, delete, take_the_lock_file])
def test_holder_of_a_directory_that_went_away_stores_and_removes_nothing(tmp_path: Path, happens):
    """Its paths lead into what another coordinator made there since."""
    with state.held(tmp_path / "c", Addresses()) as first:
        begun = first.blobs.writer()
        begun.write(b"under way")
        happens(tmp_path / "c")
        with second_holder(tmp_path / "c", happens):
            kept = DirectoryBlobs(tmp_path / "c" / "blobs")
            made = kept.writer()
            made.write(b"of the second one")
            ref = made.commit()

            for act in (
                lambda: first.blobs.delete(ref.sha256),
                first.blobs.writer,
                begun.commit,
            ):
                with pytest.raises(DiskFailed, match="was moved, deleted or replaced"):
                    act()

            assert list(kept.stored()) == [ref]


def test_holder_whose_directory_is_reached_by_another_path_goes_on(tmp_path: Path):
    """The control: only what the path leads to counts."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with state.held(tmp_path / "link", Addresses()) as stores:
        stores.blobs.delete(store(stores, b"garbage"))
        with pytest.raises(StateHeld, match=f"process {os.getpid()} "):
            open_at(tmp_path / "real", Addresses())


def test_addresses_that_cannot_be_read_are_named(tmp_path: Path):
    open_at(tmp_path / "c", Addresses())
    (tmp_path / "c" / "stores.json").write_text('{"ledger": null, "blobs"')

    with pytest.raises(StateDamaged, match=r"stores\.json' does not say where ledger and blobs"):
        open_at(tmp_path / "c", Addresses())


def test_start_without_room_is_refused_by_name_and_the_next_one_with_room_is_not(tmp_path, skip):
    """Whatever the room: each part of a new directory is the one that does not fit."""
    refused = set()
    with mounts.small_disk(tmp_path / "disk", skip, nbytes=4 << 20) as disk:
        for room in range(4 << 10, 2 << 20, 8 << 10):
            directory = disk.path / "state"
            disk.fill()
            with (disk.path / "filler").open("r+b") as filler:
                filler.truncate(filler.seek(0, os.SEEK_END) - room)
            try:
                open_at(directory, Addresses())
                break
            except StoreError as error:
                refused.add(type(error))
            finally:
                disk.free()
            open_at(directory, Addresses())
            shutil.rmtree(directory)

        assert directory.exists()
    assert StorageFull in refused <= {StorageFull, StoreError}


def test_sync_of_the_addresses_that_fails_is_a_failed_disk(tmp_path, monkeypatch):
    def refused(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "c").mkdir()
    monkeypatch.setattr("atoll.files.os.fsync", refused)
    monkeypatch.setattr("atoll.files.make_directories", lambda _: None)

    with pytest.raises(DiskFailed, match=r"stores\.json"):
        open_at(tmp_path / "c", Addresses())


def test_directory_at_rest_closes_its_blobs_when_the_work_on_it_breaks_off(tmp_path):
    open_at(tmp_path, Addresses())

    with (
        contextlib.suppress(ZeroDivisionError),
        state.at_rest(tmp_path) as (_, blobs),
    ):
        writer = blobs.writer()
        raise ZeroDivisionError

    with pytest.raises(StoreError, match="has ended"):
        writer.write(b"late")


def test_refused_start_closes_its_blobs(tmp_path, monkeypatch):
    """The check of whose blobs they are comes when they are open already."""
    closed: list[DirectoryBlobs] = []
    monkeypatch.setattr(DirectoryBlobs, "close", lambda blobs: closed.append(blobs))
    elsewhere = Addresses(blobs=str(tmp_path / "blobs"))
    (tmp_path / "blobs" / "ab").mkdir(parents=True)
    (tmp_path / "blobs" / "ab" / ("ab" * 32)).write_bytes(b"another run's")

    with pytest.raises(ConfigError, match="already holds blobs"):
        open_at(tmp_path / "c", elsewhere)

    assert len(closed) == 1
