"""What a topk payload sends, as sparse values, and their squares summed part by part, in numpy.

Nothing dense is made: a place that was sent with the value 0 is told from one that was not sent.
`support_loops` has the same in compiled loops, to the bit.
"""

from dataclasses import dataclass

import numpy as np

from atoll.codecs.topk.chunks import ABOVE, CHUNK, NEGATIVE, Chunks
from atoll.codecs.topk.magnitudes import VALUES
from atoll.compiled.arrays import Bytes, Doubles, Floats, Integers, Places

# fp64 squares of all magnitudes: exact, as are their products with any count of kept values.
SQUARES: Doubles = VALUES.astype(np.float64) ** 2


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The m values that a payload of c chunks sends, in the order of their places."""

    indices: Places  # [m], strictly ascending, from the payload's first element on
    codes: Bytes  # [m], ABOVE for the second magnitude of the chunk, NEGATIVE for a minus
    magnitudes: Bytes  # [c, 2], codes as `topk.magnitudes` spells them

    def values(self) -> Floats:
        """The fp32 values [m], as `TopK.decode` gives them."""
        found: Floats = VALUES[self.magnitudes[self.indices // CHUNK, self.codes & ABOVE]]
        return np.where(self.codes & NEGATIVE, -found, found)


def write(chunks: Chunks, first: int, indices: Places, codes: Bytes) -> None:
    """Writes what chunks without a fault send; the first one begins with element `first`."""
    indices[:] = (chunks.places() + _starts(chunks, first)).reshape(-1)
    codes[:] = chunks.values.reshape(-1)


def add_squares(chunks: Chunks, first: int, ends: Integers, squares: Doubles) -> None:
    """Adds the squares of chunks without a fault to the sums [parts] of the parts they lie in.

    See `TopK.add_squares`, which this does for chunks of one size.
    """
    places = chunks.places() + _starts(chunks, first)
    part = np.searchsorted(ends, places, "right")  # [chunks, k]
    chunk = np.broadcast_to(np.arange(len(places))[:, None], places.shape)
    # Both ascend with the places, so what is sent in one part of one chunk stands together.
    pairs = np.stack([part.reshape(-1), chunk.reshape(-1)])
    begins = np.flatnonzero(np.diff(pairs, axis=1, prepend=-1).any(axis=0))
    above = np.add.reduceat((chunks.values & ABOVE).reshape(-1), begins)
    below = np.diff(begins, append=places.size) - above
    part_of, chunk_of = pairs[:, begins]
    terms = np.stack([below, above], axis=1) * SQUARES[chunks.codes[chunk_of]]  # [pairs, 2]
    firsts = np.flatnonzero(np.diff(part_of, prepend=-1))
    for index, own in zip(part_of[firsts], np.split(terms, firsts[1:]), strict=True):
        # One after another from the left: `sum` would add in pairs.
        squares[index] = np.add.accumulate(np.append(squares[index], own))[-1]


def _starts(chunks: Chunks, first: int) -> Integers:
    """The first element of each chunk, [chunks, 1]."""
    return first + chunks.elements * np.arange(len(chunks.low))[:, None]
