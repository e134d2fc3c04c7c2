"""What a request to an S3 server carries: bytes, or a local file that is read as it is sent."""

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from atoll import files as filesystem
from atoll.blobs import drafts
from atoll.blobs.bucket import PIECE_BYTES
from atoll.errors import StoreError

MAX_BYTES = 5 << 30  # S3's own limit of one request


@dataclass(frozen=True, slots=True)
class Body:
    """A source with its size and sha256, by which the server checks what came."""

    source: bytes | Path
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, source: bytes | Path) -> Self:
        """Reads a file once, to hash it; StoreError when one request cannot carry it."""
        if isinstance(source, bytes):
            return cls(source, len(source), hashlib.sha256(source).hexdigest())
        with filesystem.naming("read", source), source.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > MAX_BYTES:
                raise StoreError(
                    f"{str(source)!r} has {nbytes} bytes; one object of a bucket takes at most "
                    f"{MAX_BYTES}"
                )
            return cls(source, nbytes, drafts.hash_file(file.fileno(), nbytes, path=source))

    @contextlib.contextmanager
    def opened(self) -> Iterator[bytes | AsyncIterator[bytes]]:
        """What is sent; of a file one piece at a time is in memory."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        with filesystem.naming("read", self.source):
            file = self.source.open("rb")
        with file:
            yield _pieces(file)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece
