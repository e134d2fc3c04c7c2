"""Accepted contributions as displacement sources: tiles decoded straight from their blobs.

A round may have more contributions than the process may have files open. As many as fit into its
share stay open while the round is folded, the others are opened anew for each tile: the order of
the sum, and so its bits, are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll import open_files
from atoll.blobs.base import BlobReader, Blobs
from atoll.codecs.base import Codec
from atoll.layout import Span, byte_view
from atoll.ledger.records import ContributionRecord
from atoll.wire import frame


@dataclass(frozen=True)
class Held:
    """A blob that stays open; whoever opened it closes it."""

    reader: BlobReader

    @contextmanager
    def reading(self) -> Iterator[BlobReader]:
        yield self.reader


@dataclass(frozen=True)
class OnDemand:
    """A blob that is open only while it is read."""

    blobs: Blobs
    sha256: str

    @contextmanager
    def reading(self) -> Iterator[BlobReader]:
        reader = self.blobs.open(self.sha256)
        try:
            yield reader
        finally:
            reader.release()


@dataclass(frozen=True)
class BlobSource:
    """One contribution's frame; reads are positioned, so several threads may share it."""

    opened: "Held | OnDemand"
    payload_offset: int
    codec: Codec
    weight: int
    factor: float

    def tile(self, span: Span) -> Tensor:
        return self.codec.decode(self.raw(span), len(span))

    def raw(self, span: Span) -> Tensor:
        offset, nbytes = frame.locate(self.payload_offset, self.codec, span)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        with self.opened.reading() as reader:
            reader.read_into(offset, byte_view(payload))
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

    `codec_of` gives the codec that contributions made for a round travel in. Every blob is opened
    once before the first is folded, so that one which is missing or changed is found by then.
    """
    most = open_files.share()
    with ExitStack() as stack:
        sources = []
        for number, contribution in enumerate(contributions):
            opened: Held | OnDemand
            if number < most:
                opened = Held(stack.enter_context(blobs.open(contribution.sha256)))
            else:
                opened = OnDemand(blobs, contribution.sha256)
            with opened.reading() as reader:
                _, payload_offset = frame.read_preamble(reader)
            codec, factor = codec_of(contribution.round), factor_of(contribution)
            weight = contribution.weight
            sources.append(BlobSource(opened, payload_offset, codec, weight, factor))
        yield sources
