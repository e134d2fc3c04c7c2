"""Payloads from a spool, seen to be what was validated when they are sent to their owners.

Between the check of an object and its use lies the rest of the window, on a disk. The first read of
an object hashes all of it: its sha256 must be the validated one. The same pass takes a hash of each
owner's run of it; what an owner is sent is compared with that at the run's last byte, so before
anything is applied.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from blake3 import blake3

from atoll.errors import StoreError
from atoll.gather import supports
from atoll.gather.partial import Accepted
from atoll.gather.spool import SpoolSlices
from atoll.layout import Span


@dataclass(slots=True, eq=False)
class _Stretch:
    """Bytes [start, stop) of an object: as they were validated, and as they are read, in order."""

    start: int
    stop: int
    sealed: blake3 = field(default_factory=blake3)
    found: blake3 = field(default_factory=blake3)


class Unchanged:
    """A rank's accepted objects; each owner's run of a payload is read once, from its first byte.

    Fulfils `SliceSource`. StoreError where the disk gives other bytes than it took.
    """

    def __init__(
        self, source: SpoolSlices, accepted: Sequence[Accepted], owners: Sequence[Span]
    ) -> None:
        self._source = source
        self._accepted = {one.uid: one for one in accepted}
        edges = (span.stop for span in owners if len(span))
        self._edges = [0, *(supports.CODEC.encoded_bytes(edge) for edge in edges)]  # of a payload
        self._sealed: dict[str, list[_Stretch]] = {}

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload, of one owner's run."""
        stretches = self._stretches(uid)
        begins = self._accepted[uid].payload_start
        data = self._source.read(uid, start, stop)
        self._compare(uid, stretches, begins + start, data)
        return data

    def preamble(self, uid: str) -> bytes:
        """What stands in an object before its payload; read once."""
        stretches = self._stretches(uid)
        data = self._source.preamble(uid)
        self._compare(uid, stretches, 0, data)
        return data

    def _compare(self, uid: str, stretches: list[_Stretch], start: int, data: bytes) -> None:
        [one] = [one for one in stretches if one.start <= start < one.stop]
        one.found.update(data)
        if start + len(data) == one.stop and one.found.digest() != one.sealed.digest():
            raise self._changed(uid)

    def _stretches(self, uid: str) -> list[_Stretch]:
        """Of an object whose bytes are the validated ones, or were when it was first read."""
        if uid not in self._sealed:
            begins = self._accepted[uid].payload_start
            edges = [0, *(begins + edge for edge in self._edges)]
            made = [_Stretch(start, stop) for start, stop in pairwise(edges)]
            digest, offset = hashlib.sha256(), 0
            for piece in self._source.pieces(uid):
                digest.update(piece)
                for one in made:
                    own = slice(max(0, one.start - offset), max(0, one.stop - offset))
                    one.sealed.update(piece[own])
                offset += len(piece)
            if digest.hexdigest() != self._accepted[uid].sha256:
                raise self._changed(uid)
            self._sealed[uid] = made
        return self._sealed[uid]

    def _changed(self, uid: str) -> StoreError:
        return StoreError(
            f"the object of {uid!r} in the spool is not what was validated a moment ago; check the "
            f"disk that has the spool directory, then start the group again: it is fetched anew"
        )
