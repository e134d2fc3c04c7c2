"""A coordinator's state directory: its stores stay where they were."""

import shutil
import stat
import uuid
from pathlib import Path

import pytest

from atoll.blobs import owner
from atoll.coordinator.boot import Stores
from atoll.errors import ConfigError, StateHeld, StoreError, Superseded
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger.records import ManifestRecord, RunRecord
from tests import lives, servers
from tests.lives import Place


def open_at(directory: Path, addresses: Addresses) -> None:
    with state.held(directory, addresses, pid=1, wall=0.0):
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
    with state.held(tmp_path / "one", shared, pid=1, wall=0.0) as stores:
        writer = stores.blobs.writer()
        writer.write(b"of another run")
        writer.commit()

    with pytest.raises(ConfigError, match="already holds blobs"):
        open_at(tmp_path / "two", shared)


def test_directory_in_use_is_not_opened_twice(tmp_path):
    with (
        state.held(tmp_path, Addresses(), pid=1, wall=0.0),
        pytest.raises(StateHeld, match="process 1"),
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
    return state.held(directory, addresses, pid=1, wall=0.0, s3=place.s3, adopt_blobs=adopt)


@pytest.fixture
def copied(tmp_path: Path, outside: Place) -> Path:
    """A copy of a run's directory whose blobs are elsewhere."""
    with held(tmp_path / "original", outside) as stores:
        sha256 = store(stores, b"initial")
        stores.ledger.create_run(
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

            assert adopted.blobs.has(sha256)
            adopted.blobs.delete(sha256)

    with (
        pytest.raises(ConfigError, match="belongs to the ledger"),
        held(copied.parent / "original", outside),
    ):
        pass


def test_marker_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / owner.KEY).write_text("{")

    with pytest.raises(StoreError, match=r"owner\.json .* cannot be read"):
        open_at(tmp_path / "c", Addresses(blobs=str(tmp_path / "b")))
