"""The topk codec: the largest 64 of every 4096 consecutive values, in 82 bytes.

SparseLoCo (arXiv 2508.15706): 1 of 64 values, 2 bits each. Places are Elias-Fano coded, so every
chunk has the same size and any tile is reached directly. `chunks` has the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.noise import Noise
from atoll.codecs.pieces import PieceFused
from atoll.codecs.topk import chunks, loops
from atoll.codecs.topk.chunks import CHUNK, Chunks
from atoll.compiled.arrays import Bytes, Floats
from atoll.compiled.base import compiled
from atoll.errors import FrameError
from atoll.layout import Span


@dataclass(frozen=True, slots=True)
class TopK:
    """Of equal magnitudes the earlier value is kept; what is not kept decodes to 0.

    Only comparisons of bits, trees of adds and divisions in fp64: the same bytes everywhere.
    """

    name = "topk"
    format = "topk_64"
    lossless = False

    def fused(self, payload: Tensor, elements: int) -> PieceFused | None:
        del payload  # bytes alone: at any address
        return PieceFused(self, loops.LOOPS, CHUNK) if compiled.ready(elements) else None

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(max(elements, 0), CHUNK)
        return whole * chunks.chunk_bytes(CHUNK) + chunks.chunk_bytes(rest)

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        del noise, first_group  # nothing is rounded by chance
        buffers.check_values(values)
        elements = values.numel()
        payload = buffers.new_or(out, size=self.encoded_bytes(elements), dtype=torch.uint8)
        if self.fused(payload, elements) is not None:
            loops.LOOPS.encode(values.numpy(), payload.numpy(), CHUNK)
            return payload
        for span, size in _spans(elements):
            self._rows(payload, span, size)[:] = chunks.pack(_of_size(span.of(values), size))
        return payload

    def _rows(self, payload: Tensor, span: Span, size: int) -> Bytes:
        """The bytes of a span of chunks of one size, [chunks, bytes], as a view."""
        place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
        rows: Bytes = place.numpy().reshape(len(span) // size, -1)
        return rows

    def check(self, payload: Tensor, elements: int) -> None:
        """FrameError unless every chunk is one that `encode` can write."""
        buffers.check_payload(self, payload, elements)
        chunk, fault = self._first_fault(payload, elements)
        if fault:
            raise FrameError(
                f"chunk {chunk} of a topk payload of {elements} elements {chunks.FAULTS[fault]}; "
                f"it must be as the codec writes it"
            )

    def _first_fault(self, payload: Tensor, elements: int) -> tuple[int, int]:
        """The first chunk with a fault, and which; (0, 0) where there is none."""
        if compiled.ready(elements):
            return loops.first_fault(payload.numpy(), elements)
        for span, size in _spans(elements):
            faults = Chunks(self._rows(payload, span, size), size).faults()
            if faults.any():
                first = int(np.argmax(faults > 0))
                return span.start // CHUNK + first, int(faults[first])
        return 0, 0

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        self.check(payload, elements)
        values = buffers.new_or(out, size=elements, dtype=torch.float32)
        if self.fused(payload, elements) is not None:
            loops.LOOPS.decode(payload.numpy(), values.numpy(), CHUNK)
            return values
        for span, size in _spans(elements):
            sized = Chunks(self._rows(payload, span, size), size)
            sized.unpack(_of_size(span.of(values), size))
        return values


def _spans(elements: int) -> Iterator[tuple[Span, int]]:
    """Chunks of one size, some groups at a time, with that size: full ones, then a short one."""
    whole = elements // CHUNK * CHUNK
    for span in buffers.runs(whole):
        yield span, CHUNK
    if whole < elements:
        yield Span(whole, elements), elements - whole


def _of_size(values: Tensor, size: int) -> Floats:
    """The values of chunks of one size, [chunks, size], as a view."""
    rows: Floats = values.numpy().reshape(-1, size)
    return rows
