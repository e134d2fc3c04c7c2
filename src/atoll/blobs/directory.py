"""Blobs as files of one directory: what was committed is still there after a crash.

    root/tmp/<draft>      while being written
    root/ab/abcd...       once committed, under its sha256

A commit is: sync the file, rename it, sync its folder. Errors of a sync are never retried. One
process writes to a root at a time; keeping others out is the task of whoever holds the state.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import drafts, names
from atoll.blobs.base import BlobRef
from atoll.blobs.drafts import Drafts, FileDraft, FileReader
from atoll.errors import DiskFailed, StoreError
from atoll.files import Identity, SystemFiles

_DRAFTS = "tmp"


class DirectoryBlobs:
    """A store of blobs below `root`, which is made when it does not exist.

    Safe to share between threads; a writer is used by one at a time.
    """

    def __init__(self, root: Path, *, files: SystemFiles = filesystem.SYSTEM) -> None:
        self._root = root.absolute()
        self._files = files
        self._lock = threading.Lock()
        self._synced_folders: set[str] = set()
        self._verified: dict[str, Identity] = {}
        self._drafts = Drafts(files, self._root / _DRAFTS, will_sync=True)
        self._failed: DiskFailed | None = None  # the first sync that failed: nothing is written on
        filesystem.make_directories(self._root, files=self._files)
        # Not synced: it is made again when it is missing, and nothing in it has to last.
        with filesystem.naming("make", self._root / _DRAFTS):
            self._files.make_directory(self._root / _DRAFTS)

    def writer(self, *, expect_bytes: int | None = None) -> FileDraft:
        self._check_disk()
        return self._drafts.new(self._commit, expect_bytes=expect_bytes)

    def open(self, sha256: str) -> FileReader:
        path = self._path(sha256)
        with filesystem.naming("open", path):
            try:
                fd = self._files.open(path)
            except FileNotFoundError as exc:
                raise names.missing(sha256, str(path)) from exc
        try:
            nbytes = self._verify(sha256, fd, path)
        except BaseException:
            self._files.close(fd)
            raise
        return FileReader(self._files, fd, path=path, nbytes=nbytes)

    def stored(self) -> Iterator[BlobRef]:
        with filesystem.naming("list", self._root):
            folders = [e.name for e in os.scandir(self._root) if names.is_folder(e.name)]
        for folder in folders:
            with filesystem.naming("list", self._root / folder):
                entries = list(os.scandir(self._root / folder))
            for entry in entries:
                if names.is_name(entry.name) and names.folder(entry.name) == folder:
                    try:
                        yield BlobRef(entry.name, entry.stat(follow_symlinks=False).st_size)
                    except FileNotFoundError:
                        continue  # deleted since the folder was read

    def delete(self, sha256: str) -> None:
        """Removes a blob. Not synced: one that returns after a crash is deleted again."""
        path = self._path(sha256)
        self._verified.pop(sha256, None)
        with filesystem.naming("remove", path):
            self._files.remove(path)

    def put_aside(self, sha256: str, folder: Path) -> None:
        """Moves a blob's file into `folder`, whatever is in it; harmless when it is absent."""
        path = self._path(sha256)
        self._verified.pop(sha256, None)
        if path.exists():
            with filesystem.naming("move", path):
                shutil.move(path, folder / sha256)

    def sweep(self) -> None:
        self._drafts.sweep()

    def close(self) -> None:
        """Drops the drafts that are still open; their writers refuse further calls."""
        self._drafts.drop_all()

    def _path(self, sha256: str) -> Path:
        return self._root / names.folder(sha256) / sha256

    def _verify(self, sha256: str, fd: int, path: Path) -> int:
        """The size of an open blob whose bytes match its name; hashes only what is not known."""
        with filesystem.naming("read", path):
            identity = self._files.identity(fd)
            if self._verified.get(sha256) != identity:
                found, identity = drafts.settled_hash(self._files, fd, path=path)
                if found != sha256:
                    raise names.changed(sha256, str(path), found=found, nbytes=identity.nbytes)
                self._verified[sha256] = identity
        return identity.nbytes

    def _is_sound(self, sha256: str) -> bool:
        """Whether a blob of that name is stored, readable and right."""
        try:
            self.open(sha256).close()
        except StoreError:
            return False
        return True

    def _commit(self, draft: FileDraft) -> BlobRef:
        ref = BlobRef(draft.digest(), draft.nbytes)
        target = self._path(ref.sha256)
        with draft.dropped_on_error():
            self._check_disk()
            draft.finish()
            with self._syncing(draft.path):
                self._files.sync_file(draft.fd)
            self._make_folder(target.parent)
            # A stored blob whose bytes are no longer right is replaced, or a damaged file would
            # stand behind a receipt for good bytes.
            if self._is_sound(ref.sha256):
                draft.drop()
            else:
                with filesystem.naming("rename to", target):
                    self._files.rename(draft.path, target)
                    self._verified[ref.sha256] = self._files.identity(draft.fd)
                draft.close()
        # Also for a blob that was there: an earlier life may have ended between rename and sync.
        with self._syncing(target.parent):
            self._files.sync_directory(target.parent)
        return ref

    def _check_disk(self) -> None:
        if self._failed is not None:
            raise self._failed

    @contextmanager
    def _syncing(self, path: Path) -> Iterator[None]:
        try:
            with filesystem.syncing(path):
                yield
        except DiskFailed as exc:
            self._failed = exc
            raise

    def _make_folder(self, folder: Path) -> None:
        # Under the lock until the root is synced: a second writer must not return a blob in a
        # folder whose own name is not on the disk yet. A folder that exists may stem from a life
        # that ended before its sync, so each is synced once per process.
        with self._lock:
            if folder.name not in self._synced_folders:
                with filesystem.naming("make", folder):
                    self._files.make_directory(folder)
                with self._syncing(self._root):
                    self._files.sync_directory(self._root)
                self._synced_folders.add(folder.name)
