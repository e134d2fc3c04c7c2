"""A version's artifact frame made where it is needed, of contributions that were fetched there.

Byte for byte the frame that the coordinator publishes, if weights and hashes are those of the
frozen list and every payload is what its hash says: validate before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import StoreError
from atoll.gather import supports
from atoll.layout import Layout, Span
from atoll.strategies.base import Strategy
from atoll.wire import frame
from atoll.wire.header import Told


@dataclass(frozen=True)
class Fetched:
    """A contribution's frame that lies here, read by position; fulfils `DisplacementSource`."""

    sha256: str
    weight: int
    payload_start: int  # where the payload begins in the frame
    read: Callable[[int, int], bytes]  # so many bytes of the frame, from an offset on

    factor = 1.0  # contributions are averaged

    def raw(self, span: Span) -> Tensor:
        """The bytes of `span`; StoreError where the frame ends before."""
        offset, nbytes = frame.locate(self.payload_start, supports.CODEC, span)
        found = bytearray(self.read(offset, nbytes))
        if len(found) != nbytes:
            raise StoreError(
                f"frame {self.sha256} gave {len(found)} bytes from {offset} on where {nbytes} "
                f"belong; its file was cut"
            )
        return torch.frombuffer(found, dtype=torch.uint8)

    def tile(self, span: Span) -> Tensor:
        """The displacement of `span`, dense."""
        return supports.CODEC.decode(self.raw(span), len(span))


def frame_of(
    strategy: Strategy,
    layout: Layout,
    fetched: Sequence[Fetched],
    *,
    run_id: str,
    manifest_sha256: str,
    round_number: int,
    base_digest: str,
    result_digest: str,
) -> Iterator[bytes] | None:
    """The bytes of the frame that brings weights of `base_digest` to the round's version.

    `strategy` and `manifest_sha256` are those that the round is under, `fetched` by worker_id. None
    where a version of so many contributions travels as weights.
    """
    bundle = strategy.bundle(layout, len(fetched))
    if bundle is None:
        return None
    header = Told(
        kind="update",
        run_id=run_id,
        manifest_sha256=manifest_sha256,
        round=round_number,
        base_digest=base_digest,
        result_digest=result_digest,
    ).header(layout, bundle)
    step = strategy.outer(round_number, 0).prepared(layout, fetched)
    return bundle.pieces(header, step, [one.sha256 for one in fetched], fetched)
