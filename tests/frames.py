"""Frames put together by the documented layout, without the writer."""

import hashlib
from dataclasses import replace

from atoll.codecs.fp32.codec import Fp32
from atoll.layout import Layout
from atoll.rows import RowRange
from atoll.wire.header import FrameHeader, Told

LAYOUT = Layout.of([("embed", (4, 3), "float32"), ("norm", (3,), "float32")])
CODEC = Fp32()
DATASET_ID = "d" * 16


def ranges(*spans: tuple[int, int], dataset_id: str = DATASET_ID) -> tuple[RowRange, ...]:
    """Rows of one dataset, as a header names them."""
    return tuple(RowRange(dataset_id, start, stop) for start, stop in spans)


def contribution(layout=LAYOUT, codec=CODEC, **changes) -> FrameHeader:
    header = Told(
        kind="contribution",
        run_id="run-1",
        manifest_sha256="a" * 64,
        round=3,
        worker_id="island-0",
        incarnation=2,
        base_digest="b" * 64,
        weight=1,
        rows=6,
        tokens=1536,
        loss_sum=2048.5,
        ranges=ranges((0, 4), (8, 10)),
    ).header(layout, codec)
    return replace(header, **changes)


def framed(text: bytes, payload: bytes) -> bytes:
    """A frame around a header's `text` whose sizes and checksum are right."""
    before = b"ATOL\x01\x00\x00\x00" + len(text).to_bytes(4, "little") + text + payload
    return before + hashlib.sha256(before).digest()


def discard(piece) -> None:
    """A sink for payloads nobody looks at."""
