"""One artifact out of all ranks' tiles: rank 0 collects them in a file and stores it."""

import hashlib
import os
from collections.abc import Sequence
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
from atoll.gather.turns import Turns
from atoll.layout import Span, byte_view

EMITTER = 0
_NOTHING = torch.empty(0, dtype=torch.uint8)


def collect(
    ranks: Collectives, turns: Turns, routes: Routes, done: Consumed, body: Path
) -> Exception | None:
    """Writes the body to `body` on the emitter, a tile at a time; all ranks call it.

    Trouble is returned and not raised, and the rank goes on to the end: the others wait for it.
    """
    trouble: Exception | None = None
    peers = len(done.uids)
    if ranks.rank == EMITTER:
        try:
            with files.naming("write an artifact's body to", body):
                body.write_bytes(b"")
        except Exception as exc:  # whatever it is, the others must hear of it
            trouble = exc
    for rank in range(ranks.size):
        for span in routes.tiles(rank) if peers else ():
            nbytes = peers * supports.nbytes_of(span)
            parts = [_NOTHING] * ranks.size
            if ranks.rank == rank:
                parts[EMITTER], trouble = _own(done, span, nbytes, trouble)
            sizes = [0] * ranks.size
            if ranks.rank == EMITTER:
                sizes[rank] = nbytes
            came = ranks.exchange(turns.next("gather"), parts, sizes)
            if ranks.rank == EMITTER and trouble is None:
                trouble = _written(body, peers * supports.CODEC.encoded_bytes(span.start), came)
    return trouble


def _own(
    done: Consumed, span: Span, nbytes: int, trouble: Exception | None
) -> tuple[Tensor, Exception | None]:
    """The bytes of an own tile; zeros once there was trouble, which a vote tells of."""
    if trouble is None:
        try:
            data = bytearray(regrouped.flat(done.tile(span), span))
            return torch.frombuffer(data, dtype=torch.uint8), None
        except Exception as exc:  # whatever it is, the others must hear of it
            trouble = exc
    return torch.zeros(nbytes, dtype=torch.uint8), trouble


def _written(body: Path, offset: int, came: Sequence[Tensor]) -> Exception | None:
    try:
        with files.naming("write an artifact's body to", body), body.open("r+b") as file:
            for part in came:
                view = byte_view(part)
                while view:
                    count = os.pwrite(file.fileno(), view, offset)
                    view, offset = view[count:], offset + count
    except Exception as exc:  # whatever it is, the others must hear of it
        return exc
    return None


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
