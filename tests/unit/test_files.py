"""Durable files: what is on the disk when a call returns, and how a disk's refusals are named."""

import errno
import os
from pathlib import Path

import pytest

from atoll import files
from atoll.errors import DiskFailed, StorageFull, StoreError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Syncs and renames in their order, each with the name it is about."""
    made: list[str] = []
    fsync, rename = os.fsync, os.rename

    def told_fsync(fd: int) -> None:
        made.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def told_rename(source: Path, target: Path) -> None:
        made.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "rename", told_rename)
    return made


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refused)


def test_whole_file_gets_its_name_after_its_bytes_are_sure(tmp_path: Path, calls: list[str]):
    files.write_whole(tmp_path / "kept", b"bytes")

    assert calls == ["sync kept.part", "rename to kept", f"sync {tmp_path.name}"]
    assert (tmp_path / "kept").read_bytes() == b"bytes"


def test_whole_file_is_its_owners_alone_whatever_an_earlier_life_left(tmp_path: Path):
    (tmp_path / "kept.part").write_bytes(b"a longer part that was cut off")
    (tmp_path / "kept.part").chmod(0o666)

    files.write_whole(tmp_path / "kept", b"bytes")

    assert (tmp_path / "kept").read_bytes() == b"bytes"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_sync_that_fails_is_a_failed_disk_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Whatever its number: after a failed sync nothing may be tried again."""
    (tmp_path / "kept").write_bytes(b"old")
    refuse(monkeypatch, "fsync", number)

    with pytest.raises(DiskFailed, match=r"did not confirm '.*kept\.part'.*; go home"):
        files.write_whole(tmp_path / "kept", b"new", way_out="go home")

    assert (tmp_path / "kept").read_bytes() == b"old"


def test_rename_without_room_is_storage_full_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "kept").write_bytes(b"old")
    refuse(monkeypatch, "rename", errno.ENOSPC)

    with pytest.raises(StorageFull, match=r"no room to rename to '.*kept'.*; go home"):
        files.write_whole(tmp_path / "kept", b"new", way_out="go home")

    assert (tmp_path / "kept").read_bytes() == b"old"


def test_sync_of_what_is_not_there_is_no_failed_disk(tmp_path: Path):
    with pytest.raises(StoreError, match=r"cannot open '.*absent'") as refused:
        files.sync(tmp_path / "absent")

    assert type(refused.value) is StoreError


def test_sync_follows_a_link_to_a_directory(tmp_path: Path, calls: list[str]):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")

    files.sync(tmp_path / "link")

    assert calls == ["sync there"]


def test_file_is_created_once_and_an_older_one_stays(tmp_path: Path, calls: list[str]):
    made = files.create_whole(tmp_path / "a", b"first"), files.create_whole(tmp_path / "a", b"2nd")

    assert made == (True, False)
    assert (tmp_path / "a").read_bytes() == b"first"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a"]
    # Of each: the bytes, under another name, and then the names.
    assert [call.endswith(".part") for call in calls] == [True, False] * 2
    assert calls[1] == calls[3] == f"sync {tmp_path.name}"


def test_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def without_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", without_room)

    with pytest.raises(StorageFull, match="create"):
        files.create_whole(tmp_path / "a", b"first")

    assert os.listdir(tmp_path) == []
