"""Objects of peers: frames and statements, good ones and such as an attacker would make."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from atoll.codecs.topk.codec import TopK
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.gather.validate import Checked, Expected, Validator
from atoll.gather.words import Reason, Skip
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.wire.header import FrameHeader
from tests.frames import contribution, framed

FIXED_BYTES, TRAILER_BYTES = 12, 32
CODEC = TopK()
KEY, OTHER_KEY = SecretKey(bytes(range(32))), SecretKey(bytes(32))
# Parameters smaller than a chunk, several in one, over an edge; a short chunk at the end.
SMALL = Layout.of(
    [(name, (size,), "float32") for name, size in zip("abcde", (7, 90, 3999, 1, 299), strict=True)]
)
# Three tiles of the validator, the last one of a group and a short chunk.
TILE_ELEMENTS = 4 * GROUP_ELEMENTS
LARGE = Layout.of(
    [
        ("embed", (300, 1000), "float32"),
        ("norm", (17,), "float32"),
        ("bias", (5,), "float32"),
        ("head", (2 * TILE_ELEMENTS + GROUP_ELEMENTS - 300_000 + 275,), "float32"),
        ("end", (3,), "float32"),
    ]
)


def expected(layout: Layout = SMALL, **changes: Any) -> Expected:
    """What the window asks of the peer whose frames `header_of` heads."""
    told = header_of(layout)
    found = Expected(
        run_id=told.run_id,
        manifest_sha256=told.manifest_sha256,
        uid=str(told.worker_id),
        window=told.round,
        base_digest=str(told.base_digest),
        layout=layout,
        codec=CODEC,
    )
    return replace(found, **changes)


def header_of(layout: Layout = SMALL, **changes: Any) -> FrameHeader:
    return replace(_right(layout), **changes) if changes else _right(layout)


@cache
def _right(layout: Layout) -> FrameHeader:
    return contribution(layout, CODEC)


def payload_of(values: Tensor) -> bytes:
    return CODEC.encode(values, noise=None, first_group=0).numpy().tobytes()


def values_for(layout: Layout, *, seed: int = 0) -> Tensor:
    """Few chunks of large values among small ones, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    chunk = torch.arange(layout.size) // 4096
    scales = torch.exp2(torch.where(chunk % 8 == 0, 2.0, -17.0 - chunk * 5 % 4))
    return torch.randn(layout.size, generator=generator) * scales


def stated(data: bytes, layout: Layout = SMALL, **changes: Any) -> Statement:
    """What an honest peer states of `data`."""
    told = header_of(layout)
    right: dict[str, Any] = {
        "run_id": told.run_id,
        "manifest_sha256": told.manifest_sha256,
        "uid": told.worker_id,
        "window": told.round,
        "base_digest": told.base_digest,
        "sample_digest": "5" * 64,
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return Statement(**{**right, **changes})


def object_of(payload: bytes, layout: Layout = SMALL, **changes: Any) -> bytes:
    """A frame whose sizes and checksum are right."""
    return framed(header_of(layout, **changes).to_json(), payload)


def resealed(data: bytes) -> bytes:
    """The same bytes with the checksum that they have now."""
    before = data[:-TRAILER_BYTES]
    return before + hashlib.sha256(before).digest()


def cut(data: bytes, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield memoryview(data)[start : start + size]


def fed(validator: Validator, data: bytes, size: int) -> Checked:
    for piece in cut(data, size):
        validator.feed(piece)
    return validator.finish()


def verdict(
    data: bytes, layout: Layout = SMALL, *, size: int = 1 << 18, **changes: Any
) -> Checked | tuple[Reason, str]:
    """What becomes of `data` under an honest statement, or one with `changes`."""
    try:
        return fed(Validator(expected(layout), stated(data, layout, **changes)), data, size)
    except Skip as skip:
        return skip.reason, skip.sentence
