"""One rank's values to one other: a header with their kind and number first, then chunks of them.

The header is what makes another length or dtype a refusal, and not a wait until the deadline.
"""

import struct

import torch
from torch import Tensor

from atoll.collectives import plain
from atoll.collectives.base import Key, Label
from atoll.collectives.places import Written
from atoll.collectives.post import Post
from atoll.errors import LayoutMismatch
from atoll.layout import Span

_HEADER = struct.Struct("<Q24s")
HEADER_BYTES = _HEADER.size
# No phase of a collective, so that a send is never taken for a part of one.
_HEADER_PHASE, _VALUES_PHASE = 1 << 30, (1 << 30) + 1


def header(values: Tensor) -> Tensor:
    """What is told of the values before they come, as bytes."""
    told = _HEADER.pack(values.numel(), _name(values.dtype).encode())
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)


def check_header(key: Key, source: int, told: bytes, out: Tensor) -> None:
    """LayoutMismatch unless what comes is as `out` is."""
    elements, name = _HEADER.unpack(told)
    kind = name.rstrip(b"\0").decode("ascii", "replace")
    if (elements, kind) != (out.numel(), _name(out.dtype)):
        raise LayoutMismatch(
            f"{key}: rank {source} sends {elements} elements of {kind}, and this rank receives "
            f"{out.numel()} of {_name(out.dtype)}; both sides must agree, nothing was received"
        )


def send(post: Post, key: Key, values: Tensor, to: int) -> None:
    """Queues all of it."""
    post.send(to, Label(key, _HEADER_PHASE, Span(0, HEADER_BYTES)), header(values))
    for piece in plain.pieces(post, Span(0, values.numel()), values.dtype):
        post.send(to, Label(key, _VALUES_PHASE, piece), piece.of(values))


def receive(post: Post, key: Key, out: Tensor, source: int, until: float) -> None:
    """`out` becomes what comes; LayoutMismatch before it changes."""
    label = Label(key, _HEADER_PHASE, Span(0, HEADER_BYTES))
    told = post.take(label, source, nbytes=HEADER_BYTES, until=until)
    check_header(key, source, bytes(told), out)
    pieces = list(plain.pieces(post, Span(0, out.numel()), out.dtype))
    for piece in pieces:
        post.expect(Label(key, _VALUES_PHASE, piece), source, Written(piece.of(out)))
    for piece in pieces:
        plain.into(post, piece.of(out), Label(key, _VALUES_PHASE, piece), source, until)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
