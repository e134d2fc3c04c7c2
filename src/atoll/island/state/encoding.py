"""From local weights to a frame: displacement, error feedback, codec, checksum."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

from torch import Tensor

from atoll.codecs import feedback
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.errors import NotFinite
from atoll.island.state.weights import Staged
from atoll.layout import TILE_BYTES, Span, byte_view
from atoll.wire import body, frame
from atoll.wire.header import FrameHeader


class Encoded(NamedTuple):
    """A frame whose body was written."""

    preamble: bytes
    sha256: str


@dataclass(frozen=True)
class Feedback:
    """Error feedback of one contribution: what is carried in, what is carried on."""

    before: Tensor  # bf16
    after: Tensor  # bf16, filled by `encode`
    write: Callable[[memoryview], object]  # gets the bytes of `after` in order
    decay: float  # the share of `before` that is added
    carried: int  # the round of the contribution that left `before`; 0: nothing was lost yet

    def keep(self, span: Span) -> None:
        """A part of the model that is not handed in keeps its residual."""
        if len(span):
            kept = span.of(self.after).copy_(span.of(self.before))
            self.write(byte_view(kept))


def encode(
    staged: Staged,
    header: FrameHeader,
    file: BinaryIO,
    *,
    codec: Codec,
    feed: Feedback | None,
    noise: Noise,
) -> Encoded:
    """Writes the body of the frame of what is staged, and with `feed` the residual after it.

    Its header then states what is left behind; NotFinite where that is NaN or infinite.
    """
    if feed is None:
        sink = body.begin(header, file)
        for span in staged.fragment.layout.tiles(TILE_BYTES):
            payload = codec.encode(staged.tile(span), noise=noise, first_group=span.first_group)
            sink.payload(byte_view(payload))
        return Encoded(frame.preamble(header), sink.finish())
    _write_fed(staged, file, codec=codec, feed=feed, noise=noise)
    norm = feedback.residual_norm(feed.after)
    if not math.isfinite(norm):
        raise NotFinite(
            f"residual={norm} of the contribution to round {header.round}: its displacement holds "
            f"NaN or infinity; nothing was sent; check the island's loss and learning rate"
        )
    told = replace(header, residual=norm, carried=feed.carried)
    return Encoded(frame.preamble(told), body.end(told, file))


def _write_fed(
    staged: Staged, file: BinaryIO, *, codec: Codec, feed: Feedback, noise: Noise
) -> None:
    """The payload, with error feedback; the residual is kept for the whole model."""
    fragment = staged.fragment
    feed.keep(Span(0, fragment.span.start))
    for span in fragment.layout.tiles(TILE_BYTES):
        where = fragment.place(span)
        residual = where.of(feed.after).copy_(where.of(feed.before))
        payload = feedback.encode_with_feedback(
            codec,
            staged.tile(span),
            residual,
            noise=noise,
            first_group=span.first_group,
            decay=feed.decay,
        )
        feed.write(byte_view(residual))
        file.write(byte_view(payload))
    feed.keep(Span(fragment.span.stop, staged.size))
