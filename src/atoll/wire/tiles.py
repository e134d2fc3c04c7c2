"""A payload that comes in pieces cut anywhere, handed on tile by tile. Memory: one tile's bytes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from atoll.codecs.base import Format
from atoll.errors import FrameError
from atoll.layout import TILE_BYTES, Layout, Span

NOTHING = Span(0, 0)


class PayloadTiles:
    """A sink of a frame's payload: `take` gets every tile's span and bytes (uint8) in their order.

    Tiles begin and end at the same elements however the payload was cut, and the bytes are good
    only during the call. One thread at a time.
    """

    def __init__(
        self,
        codec: Format,
        layout: Layout,
        take: Callable[[Span, Tensor], object],
        *,
        budget_bytes: int = TILE_BYTES,
    ) -> None:
        self._codec = codec
        self._take = take
        self._tiles = layout.tiles(budget_bytes)
        self._expect()
        self._buffer = np.empty(self._wanted, np.uint8)

    def _expect(self) -> None:
        """The next tile begins; none is larger than the first."""
        self._span = next(self._tiles, NOTHING)
        self._wanted = self._codec.encoded_bytes(len(self._span))
        self._filled = 0

    def __call__(self, piece: memoryview) -> None:
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            if not self._wanted:
                raise FrameError("the frame's payload goes on after the last tile")
            taken = data[: self._wanted - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == self._wanted:
                span, payload = self._span, torch.from_numpy(self._buffer[: self._wanted])
                self._expect()
                self._take(span, payload)
