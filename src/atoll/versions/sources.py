"""Accepted contributions as displacement sources: tiles decoded straight from their blobs."""

from collections.abc import Iterator, Sequence
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

    def tile(self, span: Span) -> Tensor:
        offset, nbytes = frame.locate(self.payload_offset, self.codec, span)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        self.reader.read_into(offset, byte_view(payload))
        return self.codec.decode(payload, len(span))


@contextmanager
def opened(
    blobs: Blobs, contributions: Sequence[ContributionRecord], codec: Codec
) -> Iterator[list[BlobSource]]:
    """Sources in the order of `contributions`, which must be the canonical one."""
    with ExitStack() as stack:
        sources = []
        for contribution in contributions:
            reader = stack.enter_context(blobs.open(contribution.sha256))
            _, payload_offset = frame.read_preamble(reader)
            sources.append(BlobSource(reader, payload_offset, codec, contribution.weight))
        yield sources
