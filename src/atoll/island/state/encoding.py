"""From local weights to a frame: displacement, error feedback, codec, checksum, in one pass."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from atoll.codecs import feedback
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.island.state.weights import IslandWeights
from atoll.layout import TILE_BYTES, byte_view
from atoll.wire import frame
from atoll.wire.header import FrameHeader


@dataclass(frozen=True)
class Encoded:
    """A frame that was written."""

    preamble: bytes
    sha256: str


@dataclass(frozen=True)
class Feedback:
    """Error feedback of one contribution: what is carried in, what is carried on."""

    before: Tensor  # bf16
    after: Tensor  # bf16, filled by `encode`
    write: Callable[[memoryview], object]  # gets the bytes of `after` in order


def encode(
    weights: IslandWeights,
    header: FrameHeader,
    write: Callable[[memoryview], object],
    *,
    codec: Codec,
    feed: Feedback | None,
    noise: Noise,
) -> Encoded:
    """Writes the contribution's frame, and with `feed` the residual after it.

    The residual before it is left as it was: a refusal goes back to it.
    """
    sink = frame.FrameWriter(header, write)
    for span in weights.layout.tiles(TILE_BYTES):
        delta = weights.displacement(span)
        if feed is None:
            payload = codec.encode(delta, noise=noise, first_group=span.first_group)
        else:
            residual = feed.after[span.start : span.stop]
            residual.copy_(feed.before[span.start : span.stop])
            payload = feedback.encode_with_feedback(
                codec, delta, residual, noise=noise, first_group=span.first_group
            )
            feed.write(byte_view(residual))
        sink.payload(byte_view(payload))
    sums = sink.finish()
    return Encoded(frame.preamble(header), sums.blob_sha256)
