"""Blobs in this process's memory: for simulation and tests. Nothing survives the process."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Self

from atoll.blobs import drafts, names
from atoll.blobs.base import BlobReader, BlobRef, BlobWriter
from atoll.errors import StoreError


class MemoryBlobs:
    """A store of blobs that keeps each as one buffer, never written to after its commit.

    Safe to share between threads; a writer is used by one at a time.
    """

    def __init__(self) -> None:
        self._stored: dict[str, bytes | bytearray] = {}
        # The very objects that were hashed: the counterpart of a file's identity.
        self._verified: dict[str, bytes | bytearray] = {}
        self._lock = threading.Lock()

    def writer(self, *, expect_bytes: int | None = None) -> "MemoryDraft":  # noqa: ARG002
        return MemoryDraft(self._keep)

    def open(self, sha256: str) -> "MemoryReader":
        names.check(sha256)
        with self._lock:
            data = self._stored.get(sha256)
            if data is None:
                raise names.missing(sha256, "memory")
            if self._verified.get(sha256) is not data:
                found = hashlib.sha256(data).hexdigest()
                if found != sha256:
                    where = f"memory:{sha256}"
                    raise names.changed(sha256, where, found=found, nbytes=len(data))
                self._verified[sha256] = data
        return MemoryReader(sha256, data)

    def stored(self) -> Iterator[BlobRef]:
        with self._lock:
            refs = [BlobRef(name, len(data)) for name, data in self._stored.items()]
        return iter(refs)

    def delete(self, sha256: str) -> None:
        names.check(sha256)
        with self._lock:
            self._stored.pop(sha256, None)
            self._verified.pop(sha256, None)

    def sweep(self) -> None:
        """Nothing to do: an unfinished writer's bytes die with it."""

    def close(self) -> None:
        """Keeps the blobs: a simulated coordinator that restarts finds them again."""

    def _keep(self, draft: "MemoryDraft") -> BlobRef:
        ref = BlobRef(draft.digest(), draft.nbytes)
        with self._lock:
            known = self._verified.get(ref.sha256)
            if known is None or known is not self._stored.get(ref.sha256):
                self._stored[ref.sha256] = self._verified[ref.sha256] = draft.data
        draft.drop()
        return ref


class MemoryDraft(BlobWriter):
    """One blob in the making, in a growing buffer."""

    def __init__(self, commit: Callable[[Self], BlobRef]) -> None:
        super().__init__(commit, name="a blob in memory")
        self.data = bytearray()

    def _append(self, view: memoryview) -> None:
        self.data += view

    def drop(self) -> None:
        self.is_open = False
        self.data = bytearray()


class MemoryReader(BlobReader):
    """Reads one blob's buffer."""

    def __init__(self, sha256: str, data: bytes | bytearray) -> None:
        self._name = sha256
        self._data: memoryview | None = memoryview(data).toreadonly()
        self.nbytes = len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._piece(offset, nbytes))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer.cast("B")[:] = self._piece(offset, buffer.nbytes)

    def close(self) -> None:
        self._data = None

    def _piece(self, offset: int, nbytes: int) -> memoryview:
        if self._data is None:
            raise StoreError(f"the reader of blob {self._name} is closed; open the blob again")
        drafts.check_range(offset, nbytes, size=self.nbytes, name=self._name)
        return self._data[offset : offset + nbytes]
