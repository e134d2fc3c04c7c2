"""Flat fp32 buffers as blobs: weights frames written and read tile by tile."""

import torch
from torch import Tensor

from atoll.blobs.base import Blobs
from atoll.codecs.fp32.codec import Fp32
from atoll.errors import StateDamaged
from atoll.layout import TILE_BYTES, Layout, byte_view
from atoll.wire import frame
from atoll.wire.header import FrameHeader, Told


def weights_header(
    layout: Layout, *, run_id: str, manifest_sha256: str, version: int, digest: str
) -> FrameHeader:
    """The header of a frame that holds whole fp32 weights."""
    return Told(
        kind="weights",
        run_id=run_id,
        manifest_sha256=manifest_sha256,
        round=version,
        result_digest=digest,
    ).header(layout, Fp32())


def store(blobs: Blobs, header: FrameHeader, flat: Tensor, *, layout: Layout) -> str:
    """Writes `flat` as a durable blob; returns its sha256. Holds one tile beside the buffer."""
    writer = blobs.writer(expect_bytes=frame.frame_bytes(header))
    try:
        sink = frame.FrameWriter(header, tee=writer)
        for span in layout.tiles(TILE_BYTES):
            sink.payload(byte_view(flat[span.start : span.stop]))
        sink.finish()
        return writer.commit().sha256
    except BaseException:
        writer.abort()
        raise


def load(blobs: Blobs, sha256: str, layout: Layout) -> Tensor:
    """The fp32 buffer of a weights blob; StateDamaged when it is of another layout."""
    with blobs.open(sha256) as reader:
        header, payload_offset = frame.read_preamble(reader)
        if header.kind != "weights" or header.layout_digest != layout.digest:
            raise StateDamaged(
                f"blob {sha256} holds {header.kind!r} of layout {header.layout_digest}, where "
                f"weights of layout {layout.digest} were expected; restore the state directory "
                f"from a copy"
            )
        flat = torch.empty(layout.size, dtype=torch.float32)
        for span in layout.tiles(TILE_BYTES):
            view = byte_view(flat[span.start : span.stop])
            reader.read_into(payload_offset + span.start * 4, view)
        return flat
