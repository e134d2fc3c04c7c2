"""A blob store that asks, before it changes anything, whether this process still may."""

from collections.abc import Callable, Iterator

from atoll.blobs.base import BlobReader, BlobRef, Blobs, BlobWriter


class FencedBlobs:
    """`blobs` with checks before every change; what a check raises ends the change.

    `check_place` is called before a writer is opened, a commit and a removal, `check` before a
    commit and a removal, `check_removal` before a removal. Reading is not checked. Between the
    checks and a removal lies one call: a process that is stopped there for longer than its lease
    may still remove a blob that nothing referenced when it looked.
    """

    def __init__(
        self,
        blobs: Blobs,
        check: Callable[[], None],
        *,
        check_place: Callable[[], None] = lambda: None,
        check_removal: Callable[[], None] = lambda: None,
    ) -> None:
        self._blobs = blobs
        self._check = check
        self._check_place = check_place
        self._check_removal = check_removal

    def writer(self, *, expect_bytes: int | None = None) -> BlobWriter:
        self._check_place()
        return _FencedWriter(self._blobs.writer(expect_bytes=expect_bytes), self._may_change)

    def open(self, sha256: str) -> BlobReader:
        return self._blobs.open(sha256)

    def stored(self) -> Iterator[BlobRef]:
        return self._blobs.stored()

    def delete(self, sha256: str) -> None:
        self._may_change()
        self._check_removal()
        self._blobs.delete(sha256)

    def sweep(self) -> None:
        self._blobs.sweep()  # drafts on the local disk, which the directory's lock guards

    def close(self) -> None:
        self._blobs.close()

    def _may_change(self) -> None:
        self._check_place()
        self._check()


class _FencedWriter:
    def __init__(self, writer: BlobWriter, check: Callable[[], None]) -> None:
        self._writer = writer
        self._check = check

    @property
    def nbytes(self) -> int:
        return self._writer.nbytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._writer.write(data)

    def digest(self) -> str:
        return self._writer.digest()

    def commit(self) -> BlobRef:
        self._check()
        return self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()
