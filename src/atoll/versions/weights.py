"""Flat fp32 buffers as blobs: weights frames written and read tile by tile."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from atoll.blobs.base import BlobReader, Blobs
from atoll.codecs.fp32.codec import Fp32
from atoll.errors import LayoutMismatch, StateDamaged
from atoll.layout import ELEMENT_BYTES, TILE_BYTES, Layout, byte_view
from atoll.sums.digest import StreamedDigest
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


def store_each(
    blobs: Blobs, header: FrameHeader, tensors: Iterable[tuple[str, Tensor]], *, layout: Layout
) -> str:
    """As `store`, of fp32 tensors that come one by one in the order of `layout`; holds one."""
    writer = blobs.writer(expect_bytes=frame.frame_bytes(header))
    try:
        sink = frame.FrameWriter(header, tee=writer)
        for _, tensor in _in_order(tensors, layout):
            sink.payload(byte_view(tensor))
        sink.finish()
        return writer.commit().sha256
    except BaseException:
        writer.abort()
        raise


def digest_each(tensors: Iterable[tuple[str, Tensor]], *, layout: Layout) -> str:
    """The params digest of fp32 tensors that come one by one in the order of `layout`."""
    found = StreamedDigest(layout)
    for _, tensor in _in_order(tensors, layout):
        found.feed(byte_view(tensor))
    return found.finish().root


def _in_order(
    tensors: Iterable[tuple[str, Tensor]], layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, contiguous and flat; LayoutMismatch unless they are the layout's, in order."""
    for spec, (name, tensor) in zip(layout.tensors, tensors, strict=True):
        if (spec.name, spec.shape) != (name, tuple(tensor.shape)):
            raise LayoutMismatch(
                f"tensor {name!r} of shape {tuple(tensor.shape)} comes where the layout has "
                f"{spec.name!r} of {spec.shape}; give them in its order"
            )
        yield name, tensor.contiguous().view(-1)


def load(blobs: Blobs, sha256: str, layout: Layout) -> Tensor:
    """The fp32 buffer of a weights blob; StateDamaged when it is of another layout."""
    with blobs.open(sha256) as reader:
        payload_offset = _payload_offset(reader, sha256, layout)
        flat = torch.empty(layout.size, dtype=torch.float32)
        for span in layout.tiles(TILE_BYTES):
            view = byte_view(flat[span.start : span.stop])
            reader.read_into(payload_offset + span.start * 4, view)
        return flat


def pieces(blobs: Blobs, sha256: str, layout: Layout) -> Iterator[memoryview]:
    """The bytes of a weights blob in layout order; a piece is valid until the next is asked for."""
    with blobs.open(sha256) as reader:
        place = _payload_offset(reader, sha256, layout)
        buffer = memoryview(bytearray(TILE_BYTES))
        for span in layout.tiles(TILE_BYTES):
            piece = buffer[: len(span) * ELEMENT_BYTES]
            reader.read_into(place + span.start * ELEMENT_BYTES, piece)
            yield piece


def _payload_offset(reader: BlobReader, sha256: str, layout: Layout) -> int:
    """Where the weights begin; StateDamaged when the blob is of another layout."""
    header, offset = frame.read_preamble(reader)
    if header.kind != "weights" or header.layout_digest != layout.digest:
        raise StateDamaged(
            f"blob {sha256} holds {header.kind!r} of layout {header.layout_digest}, where "
            f"weights of layout {layout.digest} were expected; restore the state directory "
            f"from a copy"
        )
    return offset
