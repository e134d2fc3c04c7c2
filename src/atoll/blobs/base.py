"""The blob seam: immutable byte strings named by their sha256.

A blob appears whole under its name or not at all, and once `commit` returned it survives a crash.
Nothing here knows what a blob contains.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from atoll.errors import StoreError


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A stored blob's name (sha256, lower-case hex) and size."""

    sha256: str
    nbytes: int


class BlobWriter(ABC):
    """One blob in the making. Lives until `commit` or `abort`; not visible to readers before.

    Used by one thread at a time, but may be handed from one to another between calls. A store
    derives from it and says where the bytes go; `commit` is what the store does to commit one. A
    store whose commit may be tried again leaves the writer open when it raises.
    """

    def __init__(self, commit: Callable[[Self], BlobRef], *, name: str) -> None:
        self._commit = commit
        self._name = name
        self._hash = hashlib.sha256()
        self._ref: BlobRef | None = None
        self.before_commit: Callable[[], None] = lambda: None  # what it raises ends the commit
        self.is_open = True
        self.nbytes = 0  # written so far: the offset at which a broken upload resumes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends `data` and hashes it. Raises StorageFull when there is no room."""
        self.check_open()
        with memoryview(data) as given, given.cast("B") as view:
            self._append(view)
            self._hash.update(view)
            self.nbytes += len(view)

    def digest(self) -> str:
        """sha256 (hex) of the bytes so far."""
        return self._hash.hexdigest()

    def commit(self: Self) -> BlobRef:
        """Makes the blob durable under its content name; only then returns.

        A blob of that name that is already stored is kept (its bytes are the same).
        """
        if self._ref is None:
            self.check_open()
            self.before_commit()
            self._ref = self._commit(self)
        return self._ref

    def abort(self) -> None:
        """Drops the bytes; harmless after `commit` and when repeated."""
        self.drop()

    def check_open(self) -> None:
        """StoreError once the writer has ended."""
        if not self.is_open:
            raise StoreError(
                f"the writer of {self._name} has ended; start a new one and send from byte 0"
            )

    @abstractmethod
    def _append(self, view: memoryview) -> None:
        """Keeps some more bytes; a writer that cannot is dropped."""

    @abstractmethod
    def drop(self) -> None:
        """Ends the writer and forgets its bytes; harmless when repeated and after a commit."""


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

    def release(self) -> None:
        """Closes it, and tells the store that the blob is soon read again."""
        self.close()

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
