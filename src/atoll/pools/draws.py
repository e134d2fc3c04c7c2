"""Noise keyed by who draws and by the global row, so that no division of the rows changes it."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.codecs.noise import Noise

_BITS = 24  # so that a draw is the same number in float32 and in float64


class Draw:
    """What one call of a function may draw: a value for each of its rows, [rows, *shape].

    The k-th draw of a call is keyed by (seed, function, item, k) and the row's number, so the rows
    of one rank are drawn the same when they stand on another, or on one alone.
    """

    def __init__(self, *, seed: int, name: str, item: str | None, index: Tensor) -> None:
        self._seed = seed
        self._lane = f"pools/{name}" if item is None else f"pools/{name}/{item}"
        self._rows = [int(row) for row in index]
        self._calls = 0

    def uniform(self, *shape: int) -> Tensor:
        """At least 0 and below 1, in the default dtype."""
        return self._drawn(shape, 1, lambda words: words[0])

    def normal(self, *shape: int) -> Tensor:
        """Of mean 0 and deviation 1 (Box and Muller), in the default dtype."""

        def bent(words: NDArray[np.float64]) -> NDArray[np.float64]:
            # 1 - u is never 0, so its logarithm is finite.
            far = np.sqrt(-2.0 * np.log1p(-words[0]))
            found: NDArray[np.float64] = far * np.cos(2.0 * math.pi * words[1])
            # One rounding for all dtypes: what float32 holds is what float64 gets.
            return found.astype(np.float32).astype(np.float64)

        return self._drawn(shape, 2, bent)

    def _drawn(
        self,
        shape: tuple[int, ...],
        words: int,
        bent: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> Tensor:
        noise = Noise(seed=self._seed, round=self._calls, lane=self._lane)
        self._calls += 1
        each = math.prod(shape)
        raw = [noise.words(row, words * each) for row in self._rows]
        parts = (np.stack(raw) if raw else np.empty((0, words * each), np.uint64)) >> (64 - _BITS)
        units = parts.astype(np.float64).reshape(len(raw), words, each) * 2.0**-_BITS
        found = bent(units.transpose(1, 0, 2))
        return torch.from_numpy(found).to(torch.get_default_dtype()).view(len(raw), *shape)
