"""The order in which rows are trained: a keyed permutation that needs no table.

A Feistel network permutes [0, 4^h), the smallest such range that holds the rows; values that fall
outside the rows are permuted again until they fall inside (cycle walking; Black and Rogaway 2002).
A position of a dataset's endless row sequence is of epoch `position // rows`; each epoch is its
own permutation, so every row comes once per epoch.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError

MAX_LENGTH = 1 << 62  # the network's range must fit 64 bits

# Four rounds already make a strong permutation of a large range; tiny ones need more to mix, and
# sha512 gives eight 64-bit round keys.
_ROUNDS = 8


@dataclass(frozen=True)
class Permutation:
    """A bijection of `range(length)` chosen by `key`."""

    length: int
    key: bytes

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ConfigError(f"a permutation of {self.length!r} rows; it must be 1 to 2**62")

    @cached_property
    def _half_bits(self) -> np.uint64:
        return np.uint64(max(1, ((self.length - 1).bit_length() + 1) // 2))

    @cached_property
    def _round_keys(self) -> NDArray[np.uint64]:
        return np.frombuffer(hashlib.sha512(self.key).digest(), dtype="<u8", count=_ROUNDS)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each of `positions` goes; IndexError when one is outside `range(length)`."""
        if positions.size and not 0 <= positions.min() <= positions.max() < self.length:
            found = f"{positions.min()} to {positions.max()}"
            raise IndexError(f"positions {found} are not all within 0 to {self.length - 1}")
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.length]
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = self._half_bits
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=64)
def _epoch(rows: int, seed: int, epoch: int) -> Permutation:
    return Permutation(rows, f"atoll epoch {seed} {epoch}".encode())


def rows_at(positions: NDArray[np.int64], *, rows: int, seed: int) -> NDArray[np.int64]:
    """The rows at `positions` of a dataset's endless row sequence, in their order.

    A stream (`rows` 0) is taken as it comes.
    """
    if not rows:
        return positions.copy()
    epochs, within = np.divmod(positions, rows)
    out = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        out[chosen] = _epoch(rows, seed, epoch).rows(within[chosen])
    return out
