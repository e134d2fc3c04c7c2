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
from atoll.codecs.topk import chunks, loops, support, support_loops
from atoll.codecs.topk.chunks import CHUNK, Chunks
from atoll.codecs.topk.support import Support
from atoll.compiled.arrays import Bytes, Doubles, Floats, Integers
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
        chunk, fault = self.first_fault(payload, elements)
        if fault:
            raise FrameError(
                f"chunk {chunk} of a topk payload of {elements} elements {chunks.FAULTS[fault]}; "
                f"it must be as the codec writes it"
            )

    def first_fault(self, payload: Tensor, elements: int) -> tuple[int, int]:
        """The first chunk with a fault, and which of `chunks.FAULTS`; (0, 0) where there is none.

        FrameError when the payload has another size.
        """
        buffers.check_payload(self, payload, elements)
        if compiled.ready_for_any():
            return loops.first_fault(payload.numpy(), elements)
        for span, size in _spans(elements):
            faults = Chunks(self._rows(payload, span, size), size).faults()
            if faults.any():
                first = int(np.argmax(faults > 0))
                return span.start // CHUNK + first, int(faults[first])
        return 0, 0

    def magnitudes(self, payload: Tensor, elements: int) -> Bytes:
        """The two codes of every chunk, [chunks, 2]; nothing is checked but the payload's size."""
        buffers.check_payload(self, payload, elements)
        count, full = -(-elements // CHUNK), chunks.chunk_bytes(CHUNK)
        ends = np.minimum(full * np.arange(1, count + 1), payload.numel())
        found: Bytes = payload.numpy()[ends[:, None] + np.array([-2, -1])]
        return found

    def support(self, payload: Tensor, elements: int) -> Support:
        """What a payload sends, sparse; FrameError as `decode` raises it. Makes no dense tile.

        A tile at a time: places are 32-bit integers.
        """
        self.check(payload, elements)
        sent = sum(len(span) // size * chunks.num_kept(size) for span, size in _spans(elements))
        indices, codes = np.empty(sent, np.int32), np.empty(sent, np.uint8)
        if compiled.ready_for_any():
            support_loops.write(payload.numpy(), elements, indices, codes)
        else:
            for span, size in _spans(elements):
                of = slice(*(chunks.num_kept(edge) for edge in (span.start, span.stop)))
                sized = Chunks(self._rows(payload, span, size), size)
                support.write(sized, span.start, indices[of], codes[of])
        return Support(indices, codes, self.magnitudes(payload, elements))

    def add_squares(
        self, payload: Tensor, elements: int, *, first: int, ends: Integers, squares: Doubles
    ) -> None:
        """Adds the squares of what a payload sends to `squares` [parts], part by part.

        The payload is of the elements from `first` on; part p ends before element `ends[p]`, and
        the last one does not end within the payload. In each part, chunk by chunk in their order:
        plus count * value^2 of those with the first magnitude, then of those with the second, in
        fp64, whatever their signs. So the bits are the same however a buffer is cut into payloads.
        FrameError as `decode` raises it, before anything is added.
        """
        self.check(payload, elements)
        if compiled.ready_for_any():
            support_loops.add_squares(payload.numpy(), elements, first, ends, squares)
            return
        for span, size in _spans(elements):
            sized = Chunks(self._rows(payload, span, size), size)
            support.add_squares(sized, first + span.start, ends, squares)

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
