"""Seeded rounding noise that depends on the place of a value, never on tile size or order.

Owns the derivation (seed, round, lane, group) -> bits. Knows nothing of how they are used.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError


@dataclass(frozen=True)
class Noise:
    """The noise of one round and lane; a lane is who draws: "download" or "upload/<worker_id>".

    Philox4x64-10 with the first 16 bytes of sha256(JSON [seed, round, lane]) as its key and the
    group's index in the third word of its counter, so the groups' streams never overlap.
    """

    seed: int
    round: int
    lane: str

    @cached_property
    def _key(self) -> NDArray[np.uint64]:
        text = json.dumps([self.seed, self.round, self.lane], separators=(",", ":"))
        digest = hashlib.sha256(text.encode("ascii")).digest()
        return np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)

    def words(self, group: int, count: int) -> NDArray[np.uint64]:
        """The first `count` uniform 64-bit words of the group; a longer draw starts the same."""
        # numpy counts up the first two words, so each group has 2^128 draws before the next one's.
        counter = np.array([0, 0, group, 0], dtype=np.uint64)
        # random_raw alone is covered by numpy's stream guarantee (NEP 19), and it is twice as fast
        # as Generator.bytes.
        found: NDArray[np.uint64] = np.random.Philox(key=self._key, counter=counter).random_raw(
            count
        )
        return found

    def bits16(self, group: int, count: int) -> NDArray[np.uint16]:
        """The first `count` uniform 16-bit values of the group; a longer draw starts the same."""
        words = self.words(group, -(-count // 4))
        return words.astype("<u8", copy=False).view(np.uint16)[:count]


_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: consecutive groups begin far apart
# The 32-bit mixer "lowbias32" of Wellons' hash prospector, whose bias is among the least known.
_MIX_FIRST, _MIX_SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True)
class HashedNoise(Noise):
    """The same key, cheaper bits: a counter that is hashed, which a compiled loop does by itself.

    Element i of a group draws the upper half of

        x = i + s0;  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= (x >> 15) ^ s1;  x *= 0x846CA68B

    in 32 bits, where s0 and s1 are the group's `seeds`. Good enough to round by, no more.
    """

    def seeds(self, first_group: int, count: int) -> NDArray[np.uint32]:
        """The two words that begin each group's draws, [count, 2]."""
        a, b = (int(word) for word in self._key)
        found = [
            (_mixed(a + _GOLDEN * group), _mixed(b ^ _mixed(group)))  # of their lower halves
            for group in range(first_group, first_group + count)
        ]
        return np.array(found, np.uint32).reshape(count, 2)

    def bits16(self, group: int, count: int) -> NDArray[np.uint16]:
        ((first, second),) = self.seeds(group, 1)
        x = np.arange(count, dtype=np.uint32) + first
        x ^= x >> np.uint32(16)
        x *= np.uint32(_MIX_FIRST)
        x ^= (x >> np.uint32(15)) ^ second
        x *= np.uint32(_MIX_SECOND)
        drawn: NDArray[np.uint16] = (x >> np.uint32(16)).astype(np.uint16)
        return drawn


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 16) * _MIX_FIRST & _WORD
    word = (word ^ word >> 15) * _MIX_SECOND & _WORD
    return word ^ word >> 16


def required(noise: Noise | None, codec: str) -> Noise:
    """`noise`, which stochastic rounding cannot do without."""
    if noise is None:
        raise ConfigError(
            f"{codec} with rounding='stochastic' was given no noise; pass Noise(seed, round, lane)"
        )
    return noise
