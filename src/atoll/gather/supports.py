"""What all peers say about one tile, taken apart once: the mean and the overlap read it alike.

A tile keeps as many values of every peer, so the supports are rows of three dense arrays.
"""

from dataclasses import dataclass

import numpy as np
import torch

from atoll.codecs.topk.chunks import CHUNK, num_kept
from atoll.codecs.topk.codec import TopK
from atoll.compiled.arrays import Bytes, Places
from atoll.errors import AtollError, FrameError
from atoll.layout import Span

CODEC = TopK()


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """Rows in the order of uids; places count from the tile's first element and ascend."""

    span: Span
    indices: Places  # [peers, kept]
    codes: Bytes  # [peers, kept]; 1 for the larger magnitude, 2 for a value below 0
    magnitudes: Bytes  # [peers, chunks, 2]

    @property
    def peers(self) -> int:
        return len(self.indices)


def kept_by(elements: int) -> int:
    """How many places of so many elements each peer sends."""
    whole, rest = divmod(elements, CHUNK)
    return whole * num_kept(CHUNK) + num_kept(rest)


def nbytes_of(span: Span) -> int:
    """The bytes that each peer has for a tile."""
    return CODEC.encoded_bytes(span.stop) - CODEC.encoded_bytes(span.start)


def decode(slices: Bytes, span: Span) -> Supports:
    """The supports of a tile from its bytes, [peers, nbytes_of(span)].

    FrameError for bytes that no encoder writes: they were checked when they were fetched, so what
    carried them here has changed them.
    """
    elements, chunks = len(span), -(-len(span) // CHUNK)
    made = Supports(
        span,
        np.empty((len(slices), kept_by(elements)), np.int32),
        np.empty((len(slices), kept_by(elements)), np.uint8),
        np.empty((len(slices), chunks, 2), np.uint8),
    )
    for row, data in enumerate(slices):
        payload = torch.from_numpy(data)
        try:
            found = CODEC.support(payload, elements)
        except AtollError as exc:
            raise FrameError(f"slice {row} of elements {span.start} to {span.stop}: {exc}") from exc
        made.indices[row], made.codes[row] = found.indices, found.codes
        made.magnitudes[row] = found.magnitudes
    return made
