"""A coordinator's state directory: its stores stay where they were."""

import stat
from pathlib import Path

import pytest

from atoll.errors import ConfigError, StateHeld
from atoll.launch import state
from atoll.launch.state import Addresses


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
