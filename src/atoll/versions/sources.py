"""Accepted contributions as displacement sources: tiles decoded straight from their blobs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.blobs.base import BlobReader, Blobs
from atoll.codecs.base import Codec
from atoll.layout import Span, byte_view
from atoll.ledger.records import ContributionRecord
from atoll.wire import frame


@dataclass(frozen=True)
class BlobSource:
    """One contribution's frame; reads are positioned, so several threads may share it."""

    reader: BlobReader
    payload_offset: int
    codec: Codec
    weight: int
    factor: float

    def tile(self, span: Span) -> Tensor:
        return self.codec.decode(self.raw(span), len(span))

    def raw(self, span: Span) -> Tensor:
        offset, nbytes = frame.locate(self.payload_offset, self.codec, span)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        self.reader.read_into(offset, byte_view(payload))
        return payload


@contextmanager
def opened(
    blobs: Blobs,
    contributions: Sequence[ContributionRecord],
    *,
    codec_of: Callable[[int], Codec],
    factor_of: Callable[[ContributionRecord], float],
) -> Iterator[list[BlobSource]]:
    """Sources in the order of `contributions`, which must be the canonical one.

    `codec_of` gives the codec that contributions made for a round travel in.
    """
    with ExitStack() as stack:
        sources = []
        for contribution in contributions:
            reader = stack.enter_context(blobs.open(contribution.sha256))
            _, payload_offset = frame.read_preamble(reader)
            codec, factor = codec_of(contribution.round), factor_of(contribution)
            weight = contribution.weight
            sources.append(BlobSource(reader, payload_offset, codec, weight, factor))
        yield sources
