"""The blob seam: immutable byte strings named by their sha256.

A blob appears whole under its name or not at all, and once `commit` returned it survives a crash.
Nothing here knows what a blob contains.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A stored blob's name (sha256, lower-case hex) and size."""

    sha256: str
    nbytes: int


class BlobWriter(Protocol):
    """One blob in the making. Lives until `commit` or `abort`; not visible to readers before.

    Used by one thread at a time, but may be handed from one to another between calls.
    """

    @property
    def nbytes(self) -> int:
        """Bytes written so far: the offset at which a broken upload resumes."""
        ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends `data` and hashes it. Raises StorageFull when there is no room."""
        ...

    def digest(self) -> str:
        """sha256 (hex) of the bytes so far."""
        ...

    def commit(self) -> BlobRef:
        """Makes the blob durable under its content name; only then returns.

        A blob of that name that is already stored is kept (its bytes are the same).
        """
        ...

    def abort(self) -> None:
        """Drops the bytes; harmless after `commit` and when repeated."""
        ...


class BlobReader(Protocol):
    """Random access to one stored blob, safe to share between threads.

    Implementations inherit from it: leaving a `with` block closes the reader.
    """

    nbytes: int  # the size of the blob

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` from `offset`; StoreError when the blob ends before."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes, writable) from `offset`; StoreError when the blob ends before."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Blobs(Protocol):
    """A store of blobs."""

    def writer(self, *, expect_bytes: int | None = None) -> BlobWriter:
        """A new blob in the making; `expect_bytes` lets the store reserve room first."""
        ...

    def open(self, sha256: str) -> BlobReader:
        """Reads a blob whose bytes are known to match its name.

        Raises BlobMissing, or BlobChanged naming the blob and what was found. A blob that this
        process wrote or has verified, and whose file identity is unchanged since, is not hashed
        again.
        """
        ...

    def stored(self) -> Iterator[BlobRef]:
        """Every stored blob, in no particular order."""
        ...

    def delete(self, sha256: str) -> None:
        """Removes a blob; harmless when it is absent."""
        ...

    def sweep(self) -> None:
        """Drops what unfinished writers of earlier lives left behind; called once at start."""
        ...

    def close(self) -> None: ...
