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

    def bits16(self, group: int, count: int) -> NDArray[np.uint16]:
        """The first `count` uniform 16-bit values of the group; a longer draw starts the same."""
        # numpy counts up the first two words, so each group has 2^128 draws before the next one's.
        counter = np.array([0, 0, group, 0], dtype=np.uint64)
        # random_raw alone is covered by numpy's stream guarantee (NEP 19), and it is twice as fast
        # as Generator.bytes.
        words = np.random.Philox(key=self._key, counter=counter).random_raw(-(-count // 4))
        return words.astype("<u8", copy=False).view(np.uint16)[:count]


def required(noise: Noise | None, codec: str) -> Noise:
    """`noise`, which stochastic rounding cannot do without."""
    if noise is None:
        raise ConfigError(
            f"{codec} with rounding='stochastic' was given no noise; pass Noise(seed, round, lane)"
        )
    return noise
