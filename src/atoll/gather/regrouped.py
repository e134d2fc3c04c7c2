"""A rank's own tiles, each with the bytes of all peers in uid order, in a file without a name.

An update reads every tile twice: all are computed before one is applied, and neither all means nor
all new weights fit into a memory budget. Their bytes are a fiftieth of one of them for each peer.
Nobody needs the file after a crash, so nothing is synced; a hash of each tile sees to it that both
times the same bytes were read. Owns no order and no collective.
"""

import os
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from blake3 import blake3

from atoll import files
from atoll.compiled.arrays import Bytes
from atoll.errors import StoreError
from atoll.gather import supports
from atoll.layout import GROUP_ELEMENTS, Span, byte_view


class Regrouped:
    """Written once from the first tile to the last, then read at any; a context that frees it."""

    def __init__(self, directory: Path, own: Span, *, peers: int) -> None:
        """Reserves the room for `own`, a run of whole tiles; StorageFull where there is none."""
        self.own = own
        self._directory = directory
        self.peers = peers
        self._hashes: dict[int, bytes] = {}  # by the first element of a tile
        with files.naming("keep a window's tiles in", directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  closed by the context
            try:
                nbytes = peers * supports.nbytes_of(own)
                if nbytes:
                    files.SystemFiles().reserve(self._file.fileno(), nbytes)
            except OSError:
                self._file.close()
                raise

    def __enter__(self) -> "Regrouped":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, span: Span, slices: Bytes) -> None:
        """Keeps the bytes [peers, n] of a tile."""
        view, offset = _bytes(np.ascontiguousarray(slices)), self._offset(span)
        self._hashes[span.start] = blake3(view).digest()
        with files.naming("write a window's tile in", self._directory):
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written

    def read(self, span: Span) -> Bytes:
        """The bytes [peers, n] of a tile, as they were written."""
        data = np.empty((self.peers, supports.nbytes_of(span)), np.uint8)
        view, offset = _bytes(data), self._offset(span)
        with files.naming("read a window's tile in", self._directory):
            while view:
                count = os.preadv(self._file.fileno(), [view], offset)
                if not count:
                    break
                view, offset = view[count:], offset + count
        if view or blake3(_bytes(data)).digest() != self._hashes.get(span.start):
            raise StoreError(
                f"the tile of elements {span.start} to {span.stop} is not what was written a "
                f"moment ago; check the disk that has the spool directory"
            )
        return data

    def _offset(self, span: Span) -> int:
        assert self.own.start <= span.start and span.stop <= self.own.stop, (span, self.own)
        return self.peers * supports.nbytes_of(Span(self.own.start, span.start))


def flat(tile: Bytes, span: Span) -> bytes:
    """The bytes [peers, n] of a tile as an artifact has them: group by group, peers in order."""
    parts = []
    for start in range(span.start, span.stop, GROUP_ELEMENTS):
        stop = min(start + GROUP_ELEMENTS, span.stop)
        own = slice(*(supports.CODEC.encoded_bytes(edge - span.start) for edge in (start, stop)))
        parts.append(np.ascontiguousarray(tile[:, own]).tobytes())
    return b"".join(parts)


def _bytes(data: Bytes) -> memoryview:
    """The memory of an array, flat; writing to it writes to the array."""
    return byte_view(torch.from_numpy(data.reshape(-1)))
