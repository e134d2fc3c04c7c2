"""A blob store that asks, before it changes anything, whether this process still may."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atoll.blobs.base import BlobReader, BlobRef, Blobs, BlobWriter


@dataclass(frozen=True)
class FencedBlobs:
    """`blobs` with checks before every change; what a check raises ends the change.

    Threads may share it as they may share `blobs`, when the checks can be called from any thread.
    `check_place` is called before a writer is opened, a commit and a removal, `check` before a
    commit and a removal, `check_removal` before a removal. Reading is not checked. Between the
    checks and a removal lies one call: a process that is stopped there for longer than its lease
    may still remove a blob that nothing referenced when it looked.
    """

    blobs: Blobs
    check: Callable[[], None]
    check_place: Callable[[], None] = lambda: None
    check_removal: Callable[[], None] = lambda: None

    def writer(self, *, expect_bytes: int | None = None) -> BlobWriter:
        self.check_place()
        writer = self.blobs.writer(expect_bytes=expect_bytes)
        writer.before_commit = self._may_change
        return writer

    def open(self, sha256: str) -> BlobReader:
        return self.blobs.open(sha256)

    def stored(self) -> Iterator[BlobRef]:
        return self.blobs.stored()

    def delete(self, sha256: str) -> None:
        self._may_change()
        self.check_removal()
        self.blobs.delete(sha256)

    def sweep(self) -> None:
        self.blobs.sweep()  # drafts on the local disk, which the directory's lock guards

    def close(self) -> None:
        self.blobs.close()

    def _may_change(self) -> None:
        self.check_place()
        self.check()
