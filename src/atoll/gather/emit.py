"""One artifact out of all ranks' tiles: rank 0 collects them in a file and stores it."""

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from atoll import files
from atoll.blobs.bucket import PIECE_BYTES
from atoll.collectives.base import Collectives
from atoll.gather import regrouped, supports
from atoll.gather.consume import Consumed
from atoll.gather.exchange import Routes
from atoll.gather.findings import Findings
from atoll.gather.partial import Accepted
from atoll.gather.turns import Turns
from atoll.gather.unchanged import Unchanged
from atoll.layout import Span, byte_view

EMITTER = 0
_NOTHING = torch.empty(0, dtype=torch.uint8)


def collect(
    ranks: Collectives,
    turns: Turns,
    routes: Routes,
    done: Consumed,
    *,
    accepted: Sequence[Accepted],
    source: Unchanged,
    path: Path,
) -> Exception | None:
    """Writes the body to `path` on the emitter, a preamble or a tile at a time; all ranks call it.

    `accepted` are those that were applied, `source` has what this rank fetched. Trouble is returned
    and not raised, and the rank goes on to the end: the others wait for it.
    """
    work = _Collect(ranks, turns, path)
    before = 0
    for one in accepted:
        work.take(one.rank, partial(source.preamble, one.uid), one.payload_start, at=before)
        before += one.payload_start
    peers = len(accepted)
    for rank in range(ranks.size):
        for span in routes.tiles(rank) if peers else ():
            nbytes = peers * supports.nbytes_of(span)
            at = before + peers * supports.CODEC.encoded_bytes(span.start)
            work.take(rank, partial(_tile, done, span), nbytes, at=at)
    return work.trouble


def _tile(done: Consumed, span: Span) -> bytes:
    return regrouped.flat(done.tile(span), span)


class _Collect:
    """One rank's part: its bytes go to the emitter, which writes what comes."""

    def __init__(self, ranks: Collectives, turns: Turns, path: Path) -> None:
        self.trouble: Exception | None = None
        self._ranks, self._turns, self._path = ranks, turns, path
        if ranks.rank == EMITTER:
            try:
                with files.naming("write an artifact's body to", path):
                    path.write_bytes(b"")
            except Exception as exc:  # whatever it is, the others must hear of it
                self.trouble = exc

    def take(self, rank: int, read: Callable[[], bytes], nbytes: int, *, at: int) -> None:
        """`rank` sends what it reads, so many bytes, for the place `at` in the body."""
        parts, sizes = [_NOTHING] * self._ranks.size, [0] * self._ranks.size
        if self._ranks.rank == rank:
            parts[EMITTER] = self._own(read, nbytes)
        if self._ranks.rank == EMITTER:
            sizes[rank] = nbytes
        came = self._ranks.exchange(self._turns.next("gather"), parts, sizes)
        if self._ranks.rank == EMITTER and self.trouble is None:
            try:
                self._write(came, at)
            except Exception as exc:  # whatever it is, the others must hear of it
                self.trouble = exc

    def _own(self, read: Callable[[], bytes], nbytes: int) -> Tensor:
        """Zeros once there was trouble, which a vote tells of."""
        if self.trouble is None:
            try:
                data = bytearray(read())
                assert len(data) == nbytes, (len(data), nbytes)
                return torch.frombuffer(data, dtype=torch.uint8)
            except Exception as exc:  # whatever it is, the others must hear of it
                self.trouble = exc
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _write(self, came: Sequence[Tensor], offset: int) -> None:
        with (
            files.naming("write an artifact's body to", self._path),
            self._path.open("r+b") as file,
        ):
            for part in came:
                view = byte_view(part)
                while view:
                    count = os.pwrite(file.fileno(), view, offset)
                    view, offset = view[count:], offset + count


def sha256_of(path: Path) -> str:
    """Of a file, a piece at a time."""
    digest = hashlib.sha256()
    with files.naming("read", path), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def told_of(found: Findings) -> dict[str, object]:
    """Findings as JSON has them."""
    return {
        "max_overlap": found.max_overlap,
        "mean_equal_codes": found.mean_equal_codes,
        "mean_overlap": found.mean_overlap,
        "min_overlap": found.min_overlap,
        "pairs_checked": found.pairs_checked,
        "pairs_high_ovlap": found.pairs_high_ovlap,
        "pairs_over_thresh": [
            [*pair.uids, pair.overlap, pair.equal_codes, pair.level, pair.blamed]
            for pair in found.pairs_over_thresh
        ],
        "ratio_high_ovlap": found.ratio_high_ovlap,
        "uids_over_thresh": dict(found.uids_over_thresh),
    }
