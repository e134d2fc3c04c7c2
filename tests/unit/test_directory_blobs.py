"""What the directory store promises beyond the contract: durability, full disks, changed files.

Durability is proven on a model of the disk that forgets everything no sync has confirmed, with
controls that show the model notices each omitted sync.
"""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from atoll.blobs import drafts
from atoll.blobs.directory import DirectoryBlobs
from atoll.errors import BlobChanged, DiskFailed, StorageFull, StoreError
from atoll.files import SystemFiles

TEXT = b"an atoll is a ring of islands"
NAME = hashlib.sha256(TEXT).hexdigest()


class ModelDisk(SystemFiles):
    """Real files, plus what of them would be left after a power loss."""

    def __init__(self) -> None:
        self.bytes_on_disk: dict[int, bytes] = {}
        self.names_on_disk: dict[Path, dict[str, int]] = {}
        self.unsynced_renames: list[Path] = []
        self.calls: list[tuple[str, str]] = []

    def sync_file(self, fd: int) -> None:
        super().sync_file(fd)
        self.bytes_on_disk[os.fstat(fd).st_ino] = os.pread(fd, 1 << 20, 0)
        self.calls.append(("sync_file", Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.names_on_disk[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        self.calls.append(("sync_directory", path.name))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.calls.append(("make_directory", path.name))

    def rename(self, source: Path, target: Path) -> None:
        if self.bytes_on_disk.get(source.stat().st_ino) != source.read_bytes():
            self.unsynced_renames.append(target)
        super().rename(source, target)
        self.calls.append(("rename", target.name))

    def after_power_loss(self, path: Path, *, top: Path) -> bytes | None:
        """The bytes at `path` when every name from `top` down and the file were synced."""
        inode = None
        for parent, child in zip(walk(top, path), walk(top, path)[1:], strict=False):
            inode = self.names_on_disk.get(parent, {}).get(child.name)
            if inode is None:
                return None
        return None if inode is None else self.bytes_on_disk.get(inode)


class WithoutFileSync(ModelDisk):
    def sync_file(self, fd: int) -> None:
        pass


class WithoutDirectorySync(ModelDisk):
    def sync_directory(self, path: Path) -> None:
        pass


class WithoutRootSync(ModelDisk):
    def sync_directory(self, path: Path) -> None:
        if path.name != "blobs":
            super().sync_directory(path)


class KilledBeforeDirectorySync(ModelDisk):
    """A process that ends after the rename, before any name is on the disk."""

    def sync_directory(self, path: Path) -> None:
        if len(path.name) == 2:
            raise KeyboardInterrupt


class FullDisk(SystemFiles):
    """A disk that takes `room` bytes and then answers `number`."""

    def __init__(self, *, room: int, number: int = errno.ENOSPC) -> None:
        self._room = room
        self._number = number

    def reserve(self, fd: int, nbytes: int) -> None:
        if nbytes > self._room:
            raise OSError(self._number, os.strerror(self._number))

    def write(self, fd: int, data: memoryview) -> int:
        if not self._room:
            raise OSError(self._number, os.strerror(self._number))
        count = super().write(fd, data[: self._room])
        self._room -= count
        return count


class ShortWrites(SystemFiles):
    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:3])


class CannotReserve(SystemFiles):
    def reserve(self, fd: int, nbytes: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class FailingFileSync(SystemFiles):
    def __init__(self, *, number: int) -> None:
        self.attempts = 0
        self._number = number

    def sync_file(self, fd: int) -> None:
        self.attempts += 1
        raise OSError(self._number, os.strerror(self._number))


class FailingDirectorySync(SystemFiles):
    attempts = 0

    def sync_directory(self, path: Path) -> None:
        if len(path.name) == 2:
            self.attempts += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths whose bytes were hashed on reading."""
    paths: list[Path] = []
    real = drafts.hash_file

    def counting(fd: int, nbytes: int, *, path: Path) -> str:
        paths.append(path)
        return real(fd, nbytes, path=path)

    monkeypatch.setattr(drafts, "hash_file", counting)
    return paths


def walk(top: Path, path: Path) -> list[Path]:
    return [*reversed([p for p in path.parents if p.is_relative_to(top)]), path]


def put(blobs: DirectoryBlobs, data: bytes = TEXT) -> Path:
    writer = blobs.writer()
    writer.write(data)
    name = writer.commit().sha256
    return blobs._root / name[:2] / name


def drafts_in(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


def test_commit_syncs_the_file_then_renames_then_syncs_the_folder(root: Path) -> None:
    disk = ModelDisk()
    blobs = DirectoryBlobs(root, files=disk)
    disk.calls.clear()

    put(blobs)

    assert disk.calls == [
        ("sync_file", "tmp"),
        ("make_directory", NAME[:2]),
        ("sync_directory", "blobs"),
        ("rename", NAME),
        ("sync_directory", NAME[:2]),
    ]


def test_committed_blob_survives_a_power_loss(root: Path) -> None:
    disk = ModelDisk()

    path = put(DirectoryBlobs(root, files=disk))

    assert disk.after_power_loss(path, top=root.parent) == TEXT


def test_second_blob_of_a_folder_survives_a_power_loss(root: Path) -> None:
    # The first is stored by a life that ended before the folder's own name was on the disk.
    put(DirectoryBlobs(root, files=ModelDisk()))
    (root / NAME[:2] / NAME).unlink()
    disk = ModelDisk()

    path = put(DirectoryBlobs(root, files=disk))

    assert disk.after_power_loss(path, top=root.parent) == TEXT


def test_root_survives_a_power_loss_when_its_parents_are_new(tmp_path: Path) -> None:
    disk = ModelDisk()

    path = put(DirectoryBlobs(tmp_path / "a" / "b" / "blobs", files=disk))

    assert disk.after_power_loss(path, top=tmp_path) == TEXT


def test_no_name_appears_before_its_bytes_are_on_the_disk(root: Path) -> None:
    disk = ModelDisk()

    put(DirectoryBlobs(root, files=disk))

    assert disk.unsynced_renames == []


def test_existing_blob_is_synced_again_when_an_earlier_life_was_killed(root: Path) -> None:
    killed = KilledBeforeDirectorySync()
    with pytest.raises(KeyboardInterrupt):
        put(DirectoryBlobs(root, files=killed))
    disk = ModelDisk()
    disk.bytes_on_disk.update(killed.bytes_on_disk)

    path = put(DirectoryBlobs(root, files=disk))

    assert disk.after_power_loss(path, top=root.parent) == TEXT


@pytest.mark.parametrize("mutant", [WithoutFileSync, WithoutDirectorySync, WithoutRootSync])
def test_model_disk_loses_the_blob_when_a_sync_is_omitted(
    root: Path, mutant: type[ModelDisk]
) -> None:
    disk = mutant()

    path = put(DirectoryBlobs(root, files=disk))

    assert disk.after_power_loss(path, top=root.parent) is None


def test_model_disk_reports_a_rename_before_the_file_sync(root: Path) -> None:
    disk = WithoutFileSync()

    path = put(DirectoryBlobs(root, files=disk))

    assert disk.unsynced_renames == [path]


def test_existing_blob_keeps_its_file(root: Path) -> None:
    blobs = DirectoryBlobs(root)
    before = put(blobs).stat().st_ino

    after = put(blobs).stat().st_ino

    assert after == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_named_at_the_write(root: Path, number: int) -> None:
    writer = DirectoryBlobs(root, files=FullDisk(room=10, number=number)).writer()

    with pytest.raises(StorageFull, match="free some"):
        writer.write(TEXT)


def test_full_disk_leaves_no_draft(root: Path) -> None:
    writer = DirectoryBlobs(root, files=FullDisk(room=10)).writer()

    with pytest.raises(StorageFull):
        writer.write(TEXT)

    assert drafts_in(root) == []


def test_writer_refuses_to_commit_after_a_full_disk(root: Path) -> None:
    blobs = DirectoryBlobs(root, files=FullDisk(room=10))
    writer = blobs.writer()
    with pytest.raises(StorageFull):
        writer.write(TEXT)

    with pytest.raises(StoreError, match="has ended"):
        writer.commit()


def test_full_disk_is_named_before_the_first_byte_when_the_size_is_known(root: Path) -> None:
    blobs = DirectoryBlobs(root, files=FullDisk(room=10))

    with pytest.raises(StorageFull, match=f"reserve {len(TEXT)} bytes"):
        blobs.writer(expect_bytes=len(TEXT))


def test_refused_reservation_leaves_no_draft(root: Path) -> None:
    blobs = DirectoryBlobs(root, files=FullDisk(room=10))

    with pytest.raises(StorageFull):
        blobs.writer(expect_bytes=len(TEXT))

    assert drafts_in(root) == []


def test_other_error_of_a_reservation_is_no_full_disk(root: Path) -> None:
    blobs = DirectoryBlobs(root, files=CannotReserve())

    with pytest.raises(StoreError) as caught:
        blobs.writer(expect_bytes=1)

    assert not isinstance(caught.value, StorageFull)


def refuse_reservations(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    # Replaced, because no filesystem at hand is full or lacks the call.
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_full_disk_of_the_system_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_reservations(monkeypatch, errno.ENOSPC)

    with pytest.raises(StorageFull):
        DirectoryBlobs(root).writer(expect_bytes=1)


def test_filesystem_that_cannot_reserve_is_written_to(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_reservations(monkeypatch, errno.EOPNOTSUPP)
    writer = DirectoryBlobs(root).writer(expect_bytes=len(TEXT))

    writer.write(TEXT)

    assert writer.commit().sha256 == NAME


def test_reservation_takes_real_room(root: Path) -> None:
    DirectoryBlobs(root).writer(expect_bytes=1 << 20)

    [draft] = (root / "tmp").iterdir()
    assert draft.stat().st_blocks * 512 >= 1 << 20


def test_unused_reservation_is_given_back(root: Path) -> None:
    writer = DirectoryBlobs(root).writer(expect_bytes=1 << 20)
    writer.write(TEXT)

    name = writer.commit().sha256

    assert (root / name[:2] / name).stat().st_size == len(TEXT)


def test_short_writes_are_continued(root: Path) -> None:
    path = put(DirectoryBlobs(root, files=ShortWrites()))

    assert path.read_bytes() == TEXT


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_file_sync_is_a_failed_disk(root: Path, number: int) -> None:
    """Whatever its number: a sync that found no room is no refusal that may be repeated."""
    blobs = DirectoryBlobs(root, files=FailingFileSync(number=number))

    with pytest.raises(DiskFailed, match="did not confirm"):
        put(blobs)


def test_nothing_is_written_after_a_failed_sync(root: Path) -> None:
    """Neither a new blob nor one under way: the disk's word is worth nothing any more."""
    disk = FailingFileSync(number=errno.EIO)
    blobs = DirectoryBlobs(root, files=disk)
    under_way = blobs.writer()
    with pytest.raises(DiskFailed):
        put(blobs)

    with pytest.raises(DiskFailed):
        blobs.writer()
    with pytest.raises(DiskFailed):
        under_way.commit()

    assert disk.attempts == 1


def test_failed_file_sync_is_not_retried(root: Path) -> None:
    disk = FailingFileSync(number=errno.EIO)
    writer = DirectoryBlobs(root, files=disk).writer()
    with pytest.raises(StoreError, match="did not confirm"):
        writer.commit()

    with pytest.raises(StoreError, match="has ended"):
        writer.commit()

    assert disk.attempts == 1


def test_failed_file_sync_stores_nothing(root: Path) -> None:
    blobs = DirectoryBlobs(root, files=FailingFileSync(number=errno.EIO))

    with pytest.raises(StoreError):
        put(blobs)

    assert (list(blobs.stored()), drafts_in(root)) == ([], [])


def test_failed_folder_sync_is_a_store_error_and_not_retried(root: Path) -> None:
    disk = FailingDirectorySync()
    writer = DirectoryBlobs(root, files=disk).writer()
    with pytest.raises(StoreError, match="did not confirm"):
        writer.commit()

    with pytest.raises(StoreError, match="has ended"):
        writer.commit()

    assert disk.attempts == 1


def test_blob_of_this_process_is_not_hashed_on_open(root: Path, hashed: list[Path]) -> None:
    blobs = DirectoryBlobs(root)
    path = put(blobs)
    hashed.clear()

    blobs.open(path.name).close()

    assert hashed == []


def test_blob_of_an_earlier_life_is_hashed_once(root: Path, hashed: list[Path]) -> None:
    path = put(DirectoryBlobs(root))
    hashed.clear()
    blobs = DirectoryBlobs(root)

    blobs.open(path.name).close()
    blobs.open(path.name).close()

    assert hashed == [path]


def test_blob_rewritten_with_its_size_and_time_is_refused(root: Path) -> None:
    blobs = DirectoryBlobs(root)
    path = put(blobs)
    before = path.stat()

    # The kernel's clock ticks every few ms: write until the change shows.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(TEXT[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(BlobChanged, match=f"{path}.*{NAME}"):
        blobs.open(NAME)


def test_blob_replaced_by_another_file_is_refused(root: Path) -> None:
    blobs = DirectoryBlobs(root)
    path = put(blobs)
    other = root / "other"
    other.write_bytes(TEXT[::-1])

    os.replace(other, path)

    with pytest.raises(BlobChanged, match=NAME):
        blobs.open(NAME)


def test_symbolic_link_is_no_blob(root: Path, tmp_path: Path) -> None:
    blobs = DirectoryBlobs(root)
    path = put(blobs)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match="cannot open"):
        blobs.open(NAME)


def test_refused_blob_leaves_no_open_descriptor(root: Path) -> None:
    put(DirectoryBlobs(root)).write_bytes(b"other")
    blobs = DirectoryBlobs(root)
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(BlobChanged):
        blobs.open(NAME)

    assert len(os.listdir("/proc/self/fd")) == before


def test_foreign_files_are_not_listed(root: Path) -> None:
    blobs = DirectoryBlobs(root)
    (root / "ab").mkdir()
    (root / "ab" / NAME).write_bytes(b"in the folder of another name")
    (root / "ab" / "notes.txt").write_bytes(b"")
    (root / "notes.txt").write_bytes(b"")

    assert list(blobs.stored()) == []


def test_draft_names_of_an_earlier_life_are_stepped_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = DirectoryBlobs(root)
    (root / "tmp" / f"{os.getpid()}-0.part").write_bytes(b"left by a process of the same pid")
    monkeypatch.setattr(drafts, "_SERIAL", iter([0, 1]))

    path = put(blobs)

    assert path.read_bytes() == TEXT
