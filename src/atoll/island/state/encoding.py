"""From local weights to a frame: displacement, error feedback, codec, checksum, in one pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from atoll.codecs import feedback
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.island.state.weights import Staged
from atoll.layout import TILE_BYTES, Span, byte_view
from atoll.wire import frame
from atoll.wire.header import FrameHeader


class Encoded(NamedTuple):
    """A frame that was written."""

    preamble: bytes
    sha256: str


@dataclass(frozen=True)
class Feedback:
    """Error feedback of one contribution: what is carried in, what is carried on."""

    before: Tensor  # bf16
    after: Tensor  # bf16, filled by `encode`
    write: Callable[[memoryview], object]  # gets the bytes of `after` in order
    decay: float  # the share of `before` that is added

    def keep(self, span: Span) -> None:
        """A part of the model that is not handed in keeps its residual."""
        if len(span):
            kept = span.of(self.after).copy_(span.of(self.before))
            self.write(byte_view(kept))


def encode(
    staged: Staged,
    header: FrameHeader,
    write: Callable[[memoryview], object],
    *,
    codec: Codec,
    feed: Feedback | None,
    noise: Noise,
) -> Encoded:
    """Writes the frame of what is staged, and with `feed` the residual after it."""
    sink = frame.FrameWriter(header, write)
    fragment = staged.fragment
    if feed is not None:  # the residual is kept for the whole model
        feed.keep(Span(0, fragment.span.start))
    for span in fragment.layout.tiles(TILE_BYTES):
        delta = staged.tile(span)
        if feed is None:
            payload = codec.encode(delta, noise=noise, first_group=span.first_group)
        else:
            where = fragment.place(span)
            residual = where.of(feed.after).copy_(where.of(feed.before))
            payload = feedback.encode_with_feedback(
                codec,
                delta,
                residual,
                noise=noise,
                first_group=span.first_group,
                decay=feed.decay,
            )
            feed.write(byte_view(residual))
        sink.payload(byte_view(payload))
    if feed is not None:
        feed.keep(Span(fragment.span.stop, staged.size))
    return Encoded(frame.preamble(header), sink.finish())
