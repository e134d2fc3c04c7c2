"""A version as the contributions that make it: the frame in which a gather run publishes.

    payload  table | for each 65,536 elements the bytes of all contributions, by worker_id
    table    f64 rate | for each contribution: u64 weight, sha256 of its frame,
             f32 factor of each parameter                                       little-endian

Whoever holds the version before computes the next one from it, by the same step as the coordinator
(`gather.step`), and proves it by the digest in the frame's header. The bytes are a pure function of
the header and the ordered contributions: coordinator, islands and proofs make the same frame.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atoll.codecs.fp32.codec import Fp32
from atoll.compiled.arrays import Floats
from atoll.errors import FrameError, FrameTooLarge
from atoll.gather import regrouped, supports
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, TILE_BYTES, Layout, Span
from atoll.optim.sgd import Sgd
from atoll.strategies.bundle import Change
from atoll.strategies.gather.clipped import Clipped
from atoll.strategies.gather.step import ClippedMean, move, slices
from atoll.strategies.outer import DisplacementSource, OuterStep
from atoll.wire import frame
from atoll.wire.frame import Sink
from atoll.wire.header import FrameHeader
from atoll.wire.tiles import PayloadTiles

_RATE = struct.Struct("<d")
_ENTRY = struct.Struct("<Q32s")  # followed by the factors
MAX_WEIGHT = 2**53  # as large as a count of tokens gets


@dataclass(frozen=True)
class ArtifactFormat:
    """The payload of so many contributions of a layout."""

    layout: Layout
    contributions: int

    name = "artifact"
    format = f"artifact_{supports.CODEC.format}"

    @classmethod
    def of(cls, header: FrameHeader, layout: Layout) -> "ArtifactFormat | None":
        """The one that a frame's size says; None for a frame of another codec.

        FrameError when no number of contributions has this size. FrameTooLarge for one that has
        more bytes than the whole weights: nobody makes such a one, and so whoever takes it in needs
        no more room for its table than for them.
        """
        if header.kind != "update" or header.codec != cls.format:
            return None
        each = cls(layout, 1).nbytes - _RATE.size
        count, rest = divmod(header.payload_bytes - _RATE.size, each)
        if rest or count < 1:
            raise FrameError(
                f"the artifact has payload_bytes={header.payload_bytes}; it has {_RATE.size} and "
                f"{each} for each of its contributions, of which there is one at least"
            )
        found = cls(layout, count)
        if not found.fits:
            raise FrameTooLarge(
                f"the artifact has payload_bytes={header.payload_bytes}, more than the whole "
                f"weights; they are sent in its place"
            )
        return found

    @property
    def table_bytes(self) -> int:
        factors = len(self.layout.tensors) * ELEMENT_BYTES
        return _RATE.size + self.contributions * (_ENTRY.size + factors)

    @property
    def nbytes(self) -> int:
        """Of the whole payload."""
        return self.table_bytes + Regrouped(self.contributions).encoded_bytes(self.layout.size)

    def encoded_bytes(self, elements: int) -> int:
        assert elements == self.layout.size, "a table is not of a part of the layout"
        return self.nbytes

    @property
    def fits(self) -> bool:
        """Whether it has fewer bytes than the whole weights, which are sent otherwise."""
        return self.nbytes < Fp32().encoded_bytes(self.layout.size)

    def pieces(
        self,
        header: FrameHeader,
        step: OuterStep,
        sha256s: Sequence[str],
        sources: Sequence[DisplacementSource],
    ) -> Iterator[bytes]:
        """The frame's bytes; holds a tile of each contribution at a time."""
        assert isinstance(step, ClippedMean) and step.clipped is not None, step
        start = frame.preamble(header, digest_checked=True)
        yield start
        yield Table.of(step.clipped, sha256s, rate=step.rate).to_bytes()
        for span in self.layout.tiles(TILE_BYTES):
            yield regrouped.flat(slices(sources, span), span)
        yield frame.digest_checked_trailer(start)

    def tiles(self, take: Callable[[Span, Change], object], *, round_number: int) -> Sink:
        return ArtifactTiles(self, take, step=round_number)


@dataclass(frozen=True)
class Regrouped:
    """The payload behind the table: of a group of elements the bytes of all contributions."""

    contributions: int

    name = "artifact"
    format = ArtifactFormat.format

    def encoded_bytes(self, elements: int) -> int:
        return self.contributions * supports.CODEC.encoded_bytes(elements)


@dataclass(frozen=True, eq=False)
class Table:
    """What the contributions of a frame count with; rows by worker_id."""

    rate: float  # of the outer step
    weights: tuple[int, ...]
    sha256s: tuple[str, ...]  # of the contributions' frames
    factors: Floats  # [contributions, parameters]

    @classmethod
    def of(cls, clipped: Clipped, sha256s: Iterable[str], *, rate: float) -> "Table":
        """The table of a round whose contributions are `clipped`, in the order of `sha256s`."""
        named = tuple(sha256s)
        assert len(named) == len(clipped.weights), (len(named), len(clipped.weights))
        return cls(rate, clipped.weights, named, clipped.factors)

    def to_bytes(self) -> bytes:
        """The one spelling of this table."""
        rows = zip(self.weights, self.sha256s, self.factors.astype("<f4"), strict=True)
        return _RATE.pack(self.rate) + b"".join(
            _ENTRY.pack(weight, bytes.fromhex(sha256)) + factors.tobytes()
            for weight, sha256, factors in rows
        )

    @classmethod
    def parse(cls, data: bytes, of: ArtifactFormat) -> "Table":
        """The table in `data`; FrameError names the first number that cannot be one of a run."""
        assert len(data) == of.table_bytes, (len(data), of.table_bytes)
        [rate] = _RATE.unpack_from(data)
        if not (math.isfinite(rate) and rate > 0):
            raise FrameError(f"the artifact has rate={rate}; it must be a finite number above 0")
        width = len(of.layout.tensors)
        step = _ENTRY.size + width * ELEMENT_BYTES
        factors = np.empty((of.contributions, width), np.float32)
        weights, sha256s = [], []
        for row, at in enumerate(range(_RATE.size, len(data), step)):
            weight, sha256 = _ENTRY.unpack_from(data, at)
            if not 1 <= weight <= MAX_WEIGHT:
                raise FrameError(
                    f"contribution {row} of the artifact has weight={weight}; it must be from 1 "
                    f"to 2^53"
                )
            factors[row] = np.frombuffer(data, "<f4", width, at + _ENTRY.size)
            if not ((factors[row] >= 0) & (factors[row] <= 1)).all():
                raise FrameError(
                    f"contribution {row} of the artifact has a factor outside 0 to 1; none is "
                    f"larger than 1"
                )
            weights.append(weight)
            sha256s.append(sha256.hex())
        return cls(rate, tuple(weights), tuple(sha256s), factors)


class ArtifactTiles:
    """A sink of a frame's payload: `take` gets every group's span, and what moves its weights.

    Memory: the table, then the bytes of one group. The caller proves the result by the digest.
    """

    def __init__(
        self, of: ArtifactFormat, take: Callable[[Span, Change], object], *, step: int
    ) -> None:
        self._format = of
        self._take = take
        self._step = step
        self._head = bytearray()
        self._table: Table | None = None
        self._tiles = PayloadTiles(
            Regrouped(of.contributions),
            of.layout,
            self._group,
            budget_bytes=GROUP_ELEMENTS * ELEMENT_BYTES,
        )

    def __call__(self, piece: memoryview) -> None:
        if self._table is None:
            missing = self._format.table_bytes - len(self._head)
            self._head += piece[:missing]
            piece = piece[missing:]
            if len(self._head) < self._format.table_bytes:
                return
            self._table = Table.parse(bytes(self._head), self._format)
        if piece.nbytes:
            self._tiles(piece)

    def _group(self, span: Span, payload: Tensor) -> None:
        table = self._table
        assert table is not None, "the table comes first"
        rows = payload.numpy().reshape(self._format.contributions, -1)
        sent = supports.decode(rows, span)

        def change(tile: Tensor) -> None:
            move(
                tile,
                sent,
                layout=self._format.layout,
                factors=table.factors,
                weights=table.weights,
                optimizer=Sgd(table.rate),
                step=self._step,
            )

        self._take(span, change)
