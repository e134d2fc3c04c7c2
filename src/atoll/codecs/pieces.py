"""Compiled steps of codecs that encode piece by piece: a block with its scale, a sparse chunk.

A piece is a run of values that are encoded together; pieces divide a group, and only the last one
of a span may be short. The payload of a group is the heads of its pieces, then their bodies. A
codec says how one piece is packed and unpacked; what a sync does with pieces is written here once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.compiled.arrays import (
    BYTES,
    FLOATS,
    HALVES,
    INTEGER,
    NUMBER,
    PAIRS,
    Bytes,
    Floats,
    Halves,
    Words,
)
from atoll.compiled.bits import carried, nearest
from atoll.compiled.jit import Loop, loop
from atoll.layout import GROUP_ELEMENTS


class PieceLoops(NamedTuple):
    """The loops over a span, each with the elements of a piece as an argument.

    Arrays of one call are flat, contiguous, aligned and do not overlap; nothing checks bounds.
    """

    encode: Loop[[Floats, Bytes, int], None]
    decode: Loop[[Bytes, Floats, int], None]
    feed: Loop[[Floats, Halves, Bytes, int, np.float32], None]
    publish: Loop[[Floats, Floats, Bytes, int], None]
    square_sum: Loop[[Bytes, int, int], float]
    # With `codecs.noise.HashedNoise`: the pairs are its groups' seeds. None: no loop draws.
    encode_drawn: Loop[[Floats, Bytes, int, Words], None] | None


PackDrawn = Callable[[Floats, Bytes, Bytes, int, np.uint32, np.uint32], None]


def loops_of(
    *,
    head_bytes: int,
    body_bytes: Callable[[int], int],
    pack: Callable[[Floats, Bytes, Bytes], None],
    unpack: Callable[[Bytes, Bytes, Floats], None],
    squares: Callable[[Bytes, Bytes, int], float],
    pack_drawn: PackDrawn | None = None,
) -> PieceLoops:
    """The loops of a codec; its own, all of them loops, see one piece each.

    `body_bytes(elements)`, `pack(values, head, body)`, `unpack(head, body, values)` and
    `squares(head, body, elements)`, which is `codecs.finite.square_sum` of the decoded piece.
    `pack_drawn(values, head, body, index, s0, s1)` rounds by draws; `index` is the first value's
    place in its group.
    """

    @loop()
    def place(payload: Bytes, first: int, elements: int, piece: int) -> tuple[Bytes, Bytes]:
        """Head and body, as views, of the piece that begins with element `first`."""
        start = first - first % GROUP_ELEMENTS  # of its group, whose pieces before it are whole
        size = min(GROUP_ELEMENTS, elements - start)
        index = (first - start) // piece
        full = body_bytes(piece)
        heads = start // piece * (head_bytes + full)
        head = heads + index * head_bytes
        body = heads + head_bytes * ((size + piece - 1) // piece) + index * full
        last = body + body_bytes(min(piece, elements - first))
        return payload[head : head + head_bytes], payload[body:last]

    @loop(FLOATS, BYTES, INTEGER)
    def encode(values: Floats, payload: Bytes, piece: int) -> None:
        for first in range(0, values.size, piece):
            head, body = place(payload, first, values.size, piece)
            pack(values[first : first + piece], head, body)

    @loop(BYTES, FLOATS, INTEGER)
    def decode(payload: Bytes, values: Floats, piece: int) -> None:
        for first in range(0, values.size, piece):
            head, body = place(payload, first, values.size, piece)
            unpack(head, body, values[first : first + piece])

    @loop(FLOATS, HALVES, BYTES, INTEGER, NUMBER)
    def feed(
        values: Floats, residual: Halves, payload: Bytes, piece: int, decay: np.float32
    ) -> None:
        """v = values + decay * residual; residual = bf16(v - decode(encode(v)))."""
        room = np.empty((2, piece), np.float32)  # encoded and decoded while it is in cache
        for first in range(0, values.size, piece):
            new, kept = values[first : first + piece], residual[first : first + piece]
            wanted, sent = room[0][: new.size], room[1][: new.size]
            for i in range(new.size):
                wanted[i] = carried(kept[i], decay) + new[i]
            head, body = place(payload, first, values.size, piece)
            pack(wanted, head, body)
            unpack(head, body, sent)
            for i in range(new.size):
                kept[i] = np.uint16(nearest(wanted[i] - sent[i]))

    @loop(FLOATS, FLOATS, BYTES, INTEGER)
    def publish(master: Floats, published: Floats, payload: Bytes, piece: int) -> None:
        """published += decode(encode(master - published))."""
        room = np.empty((2, piece), np.float32)
        for first in range(0, master.size, piece):
            true, known = master[first : first + piece], published[first : first + piece]
            wanted, sent = room[0][: true.size], room[1][: true.size]
            for i in range(true.size):
                wanted[i] = true[i] - known[i]
            head, body = place(payload, first, master.size, piece)
            pack(wanted, head, body)
            unpack(head, body, sent)
            for i in range(true.size):
                known[i] = known[i] + sent[i]

    @loop(BYTES, INTEGER, INTEGER)
    def square_sum(payload: Bytes, elements: int, piece: int) -> float:
        total = 0.0
        for first in range(0, elements, piece):
            head, body = place(payload, first, elements, piece)
            total += squares(head, body, min(piece, elements - first))
        return total

    drawn = None if pack_drawn is None else _drawn_of(place, pack_drawn)
    return PieceLoops(encode, decode, feed, publish, square_sum, drawn)


def _drawn_of(
    place: Callable[[Bytes, int, int, int], tuple[Bytes, Bytes]], pack: PackDrawn
) -> Loop[[Floats, Bytes, int, Words], None]:
    @loop(FLOATS, BYTES, INTEGER, PAIRS)
    def encode_drawn(values: Floats, payload: Bytes, piece: int, seeds: Words) -> None:
        for first in range(0, values.size, piece):
            head, body = place(payload, first, values.size, piece)
            pair = seeds[first // GROUP_ELEMENTS]
            index = first % GROUP_ELEMENTS
            pack(values[first : first + piece], head, body, index, pair[0], pair[1])

    return encode_drawn


class Checking(Protocol):
    """A codec that says whether a payload is one of its own."""

    def check(self, payload: Tensor, elements: int) -> None:
        """FrameError unless `payload` is what `elements` can encode to."""
        ...


@dataclass(frozen=True, slots=True)
class PieceFused:
    """The loops on torch's tensors; see `codecs.base.Fused`."""

    codec: Checking
    loops: PieceLoops
    piece: int

    def feed(self, values: Tensor, residual: Tensor, payload: Tensor, *, decay: float) -> None:
        kept = residual.view(torch.uint16).numpy()
        self.loops.feed(values.numpy(), kept, payload.numpy(), self.piece, np.float32(decay))

    def publish(self, master: Tensor, published: Tensor, payload: Tensor) -> None:
        self.loops.publish(master.numpy(), published.numpy(), payload.numpy(), self.piece)

    def square_sum(self, payload: Tensor, elements: int) -> float:
        # A loop would read beyond the end of a short payload.
        self.codec.check(payload, elements)
        return self.loops.square_sum(payload.numpy(), elements, self.piece)
