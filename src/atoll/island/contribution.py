"""From local weights to a frame: displacement, error feedback, codec, checksum, in one pass."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from atoll.codecs import feedback
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.island.weights import TILE_BYTES, IslandWeights
from atoll.layout import byte_view
from atoll.wire import frame
from atoll.wire.header import FrameHeader


@dataclass(frozen=True)
class Encoded:
    """A frame that was written, and the residual that is due once it is accepted."""

    preamble: bytes
    sha256: str
    residual: Tensor | None  # bf16


def encode(
    weights: IslandWeights,
    header: FrameHeader,
    write: Callable[[memoryview], object],
    *,
    codec: Codec,
    residual: Tensor | None,
    noise: Noise,
) -> Encoded:
    """Writes the contribution's frame; `residual` is left as it was, the next one is returned."""
    after = None if residual is None else residual.clone()
    sink = frame.FrameWriter(header, write)
    for span in weights.layout.tiles(TILE_BYTES):
        delta = weights.displacement(span)
        if after is None:
            payload = codec.encode(delta, noise=noise, first_group=span.first_group)
        else:
            payload = feedback.encode_with_feedback(
                codec,
                delta,
                after[span.start : span.stop],
                noise=noise,
                first_group=span.first_group,
            )
        sink.payload(byte_view(payload))
    sums = sink.finish()
    return Encoded(frame.preamble(header), sums.blob_sha256, after)
