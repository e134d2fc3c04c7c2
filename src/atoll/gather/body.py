"""The body of an artifact: every byte of the applied frames that cannot be computed, by tile.

    the frames' preambles, in uid order
    for each group of 65,536 elements the payload bytes of all peers, in uid order

Frames end in a checksum of what stands before, so a frame can be rebuilt from here bit by bit. Owns
where what lies; what a body is worth is for `rebuild` to say.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from atoll import files
from atoll.blobs.bucket import PIECE_BYTES
from atoll.compiled.arrays import Bytes
from atoll.errors import FrameError
from atoll.gather import supports
from atoll.gather.partial import Accepted
from atoll.layout import GROUP_ELEMENTS, Layout, Span, byte_view
from atoll.wire import frame

_GROUP_BYTES = supports.CODEC.encoded_bytes(GROUP_ELEMENTS)  # of each peer


def preambles_bytes(accepted: Sequence[Accepted]) -> int:
    """What stands before the payloads."""
    return sum(one.payload_start for one in accepted)


def nbytes_of(accepted: Sequence[Accepted], layout: Layout) -> int:
    """The size of a body; FrameError for a peer whose frame cannot have the size it is said to."""
    payload = supports.nbytes_of(Span(0, layout.size))
    for one in accepted:
        rest = payload + frame.TRAILER_BYTES
        if not frame.FIXED_BYTES < one.payload_start <= frame.MAX_PREAMBLE_BYTES:
            raise FrameError(
                f"the payload of {one.uid!r} begins at byte {one.payload_start}; a frame's header "
                f"ends at {frame.MAX_PREAMBLE_BYTES} at the latest"
            )
        if one.nbytes != one.payload_start + rest:
            raise FrameError(
                f"the object of {one.uid!r} has {one.nbytes} bytes, {one.payload_start} of them "
                f"before its payload; with a payload of this layout they are "
                f"{one.payload_start + rest}"
            )
    return preambles_bytes(accepted) + len(accepted) * payload


class BodySlices:
    """A body on disk, read by uid and position; fulfils `SliceSource`. Checks nothing."""

    def __init__(self, path: Path, accepted: Sequence[Accepted], layout: Layout) -> None:
        self._path = path
        self._rows = {one.uid: row for row, one in enumerate(accepted)}
        ends = np.cumsum([0, *(one.payload_start for one in accepted)]).tolist()
        self._preambles = dict(zip(self._rows, pairwise(ends), strict=True))
        self._first = ends[-1]  # byte of the payloads
        self._payload_bytes = supports.CODEC.encoded_bytes(layout.size)

    def preamble(self, uid: str) -> bytes:
        """A frame's bytes before its payload."""
        start, stop = self._preambles[uid]
        made = bytearray(stop - start)
        self._fill(start, memoryview(made))
        return bytes(made)

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload, counted from its first chunk."""
        made = bytearray(stop - start)
        fd = files.SYSTEM.open(self._path)
        try:
            for begin in range(start // _GROUP_BYTES * _GROUP_BYTES, stop, _GROUP_BYTES):
                length = min(_GROUP_BYTES, self._payload_bytes - begin)  # of this group, each peer
                first, last = max(start, begin), min(stop, begin + length)
                place = len(self._rows) * begin + self._rows[uid] * length + first - begin
                room = memoryview(made)[first - start : last - start]
                files.read_into(fd, self._first + place, room, path=self._path)
        finally:
            files.SYSTEM.close(fd)
        return bytes(made)

    def blocks(self) -> Iterator[Bytes]:
        """The payloads [peers, n] from their first byte to the last, a few groups at a time."""
        peers = len(self._rows)
        step = max(1, PIECE_BYTES // max(1, peers * _GROUP_BYTES)) * _GROUP_BYTES
        begin = 0
        while peers and begin < self._payload_bytes:
            length = min(step, self._payload_bytes - begin)
            if length > _GROUP_BYTES:
                length -= length % _GROUP_BYTES  # a short last group comes by itself
            data = np.empty(peers * length, np.uint8)
            self._fill(self._first + peers * begin, byte_view(torch.from_numpy(data)))
            by_group = data.reshape(-1, peers, min(length, _GROUP_BYTES))
            yield np.ascontiguousarray(by_group.swapaxes(0, 1)).reshape(peers, length)
            begin += length

    def _fill(self, place: int, room: memoryview) -> None:
        fd = files.SYSTEM.open(self._path)
        try:
            files.read_into(fd, place, room, path=self._path)
        finally:
            files.SYSTEM.close(fd)
