"""Whose places are whose: exact counts of shared places for each pair of peers.

A rank counts over its own tiles, by bitmaps; integers add up over ranks in any order. A peer's
places are 1 in 64, so two honest peers who know nothing of each other share 1.6 % of them.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.codecs.topk.chunks import ABOVE, CHUNK, NEGATIVE, ROW
from atoll.collectives.base import Collectives
from atoll.compiled.arrays import Bytes, Integers, Places
from atoll.compiled.base import compiled
from atoll.gather import loops
from atoll.gather.supports import Supports
from atoll.gather.turns import Turns

_STEP = 4 * CHUNK  # elements at a time: 22 KB of bits and bytes for each peer
_KEPT = _STEP // ROW  # places of a step that each peer sends


class PairCounts:
    """How many places each pair of peers shares, and at how many of them both codes are equal.

    A code says which of a chunk's two magnitudes a value has, and its sign.
    """

    def __init__(self, peers: int) -> None:
        self.table: Tensor = torch.zeros(2, peers, peers, dtype=torch.int64)

    @property
    def shared(self) -> Integers:
        """[peers, peers], above the diagonal; rows in the order of uids."""
        found: Integers = self.table[0].numpy()
        return found

    @property
    def equal(self) -> Integers:
        """As `shared`: those whose codes are equal."""
        found: Integers = self.table[1].numpy()
        return found

    def add(self, sent: Supports) -> None:
        """Counts a tile."""
        if sent.peers < 2:
            return
        if compiled.ready_for_any():
            loops.overlap(sent.indices, sent.codes, self.shared, self.equal)
            return
        for start in range(0, sent.indices.shape[1], _KEPT):
            part = slice(start, start + _KEPT)
            base = start // _KEPT * _STEP
            self._add_step(sent.indices[:, part] - base, sent.codes[:, part])

    def _add_step(self, places: Places, codes: Bytes) -> None:
        """`loops.overlap` in numpy, some chunks at a time."""
        ones = np.ones_like(codes)
        sent, above, minus = (
            _words(places, told) for told in (ones, codes & ABOVE, codes & NEGATIVE)
        )
        for row in range(len(places) - 1):
            others = slice(row + 1, None)
            both = sent[row] & sent[others]
            alike = both & ~((above[row] ^ above[others]) | (minus[row] ^ minus[others]))
            self.shared[row, others] += _ones(both)
            self.equal[row, others] += _ones(alike)

    def reduce(self, ranks: Collectives, turns: Turns) -> None:
        """Adds up the counts of all ranks, on all of them."""
        if self.table.numel():
            ranks.all_reduce(turns.next("reduce"), self.table.view(-1)).wait()


def _words(places: Places, told: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A bit for each element of a step, set where a peer tells something, [peers, words]."""
    bits = np.zeros((len(places), _STEP), np.bool_)
    np.put_along_axis(bits, places, told.astype(np.bool_), axis=1)
    words: NDArray[np.uint64] = np.packbits(bits, axis=1).view(np.uint64)
    return words


def _ones(words: NDArray[np.uint64]) -> Integers:
    counted: Integers = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return counted
