"""The seam of versions that travel as the contributions that make them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from atoll.codecs.base import Format
from atoll.layout import Span
from atoll.strategies.outer import DisplacementSource, OuterStep
from atoll.wire.frame import Sink
from atoll.wire.header import FrameHeader

Change = Callable[[Tensor], object]  # what is done to a tile of the weights, in place


class Bundle(Format, Protocol):
    """The payload of such a version: its contributions, and what they count with."""

    def pieces(
        self,
        header: FrameHeader,
        step: OuterStep,
        sha256s: Sequence[str],
        sources: Sequence[DisplacementSource],
    ) -> Iterator[bytes]:
        """The frame under `header`, from its first byte to its last.

        `sources` are the contributions in order, `sha256s` their frames; `step` is prepared for
        them.
        """

    def tiles(self, take: Callable[[Span, Change], object], *, round_number: int) -> Sink:
        """A sink of the payload; `take` gets each tile's span, and what moves its weights."""
