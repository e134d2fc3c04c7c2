"""The one validator of peers' objects: for primaries, reserves, catch-up and the coordinator.

In this order, each before more is read: the statement's spelling and signature; its fields; the
size it names; the frame's header; tile by tile indices, magnitudes and the norm so far; the frame's
checksum; the sha256 that the statement names. The first thing that is wrong is a `Skip`, the same
one however the bytes were cut. Reads nothing itself and keeps one tile's bytes, some kilobytes.
"""

import hmac
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from atoll.codecs.topk.chunks import CHUNK, FAULTS, MAGNITUDES
from atoll.codecs.topk.magnitudes import NOT_FINITE
from atoll.errors import ConfigError, FrameError, ProtocolError
from atoll.gather import statement as statements
from atoll.gather.keys import PublicKey
from atoll.gather.norms import Norms
from atoll.gather.statement import Statement
from atoll.gather.words import Reason, Skip
from atoll.layout import Layout, Span
from atoll.optim.base import MAX_NORM
from atoll.wire import frame
from atoll.wire.frame import BytesLike, FrameReader, Tee
from atoll.wire.header import FrameHeader
from atoll.wire.tiles import PayloadTiles

if TYPE_CHECKING:  # its loops are compiled where it is used, not where it is named
    from atoll.codecs.topk.codec import TopK

# A sentence shows what a peer wrote, and stands in results and logs.
MAX_SENTENCE = 500
_MIN_HEADER_BYTES = len(b"{}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a window asks of a peer's object."""

    run_id: str
    manifest_sha256: str
    uid: str
    window: int
    base_digest: str
    layout: Layout
    codec: "TopK"
    norm_bound: float = MAX_NORM  # the accept path's
    sample_digest: str | None = None  # where it is known which rows the peer trains on

    def __post_init__(self) -> None:
        if not 0 < self.norm_bound < math.inf:
            raise ConfigError(f"norm_bound={self.norm_bound} must be a finite number above 0")

    def frame_bytes(self) -> range:
        """The sizes that a frame can have: the payload's is fixed, the header's is bounded."""
        rest = self.codec.encoded_bytes(self.layout.size) + frame.TRAILER_BYTES
        shortest = frame.FIXED_BYTES + _MIN_HEADER_BYTES
        return range(rest + shortest, rest + frame.MAX_PREAMBLE_BYTES + 1)

    def check(self, statement: Statement) -> None:
        """Skip(STATEMENT) for another run, manifest, uid, window, base or rows; Skip(SIZE)."""
        for name in ("run_id", "manifest_sha256", "uid", "window", "base_digest", "sample_digest"):
            found, wanted = getattr(statement, name), getattr(self, name)
            if wanted is not None and found != wanted:
                raise _skip(
                    Reason.STATEMENT,
                    f"the statement of {self.uid!r} has {name}={found!r} where window "
                    f"{self.window} has {wanted!r}",
                )
        sizes = self.frame_bytes()
        if statement.nbytes not in sizes:
            raise _skip(
                Reason.SIZE,
                f"the statement of {self.uid!r} names an object of {statement.nbytes} bytes; a "
                f"frame of this run has {sizes[0]} to {sizes[-1]}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """An object that may be applied."""

    sha256: str
    nbytes: int
    header: FrameHeader
    payload_start: int  # where the payload begins in the object
    squares: tuple[float, ...]  # norm^2 of every parameter, in the layout's order
    norm: float  # of the whole displacement


class Validator:
    """Takes one object in pieces cut anywhere, and says whether it is what its statement says.

    A `tee` (a spool file) gets every byte and hashes it in the validator's place; what is in it
    counts only once `finish` has returned. After an error every further call raises it again: a
    `Skip`, or what the tee raised, which is no fault of the peer. One thread at a time.
    """

    def __init__(self, expected: Expected, statement: Statement, *, tee: Tee | None = None) -> None:
        """Skip when the statement is not the expected one; no byte of the object is asked for."""
        expected.check(statement)
        self._expected = expected
        self._statement = statement
        self._norms = Norms(expected.layout, expected.codec)
        self._tiles = PayloadTiles(expected.codec, expected.layout, self._check_tile)
        self._reader = FrameReader(self._tiles, tee=tee, expect=self._check_header)
        self._taken = 0
        self._failure: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """The bytes taken so far: the offset at which a broken download goes on."""
        return self._taken

    @property
    def missing(self) -> int:
        """The bytes of the object that are still to come."""
        return self._statement.nbytes - self._taken

    def feed(self, piece: BytesLike) -> None:
        """Takes the next bytes; Skip at the first byte, header or tile that must not be there."""
        view = memoryview(piece).cast("B")
        with self._failing_once():
            # What belongs to the object comes first: the verdict is that of smaller pieces.
            own, beyond = view[: self.missing], view[self.missing :]
            self._taken += own.nbytes
            self._reader.feed(own)
            if beyond.nbytes:
                raise self._skip(
                    Reason.SIZE, f"goes on after the {self._statement.nbytes} bytes it is to have"
                )

    def finish(self) -> Checked:
        """What was found, once the object is over; Skip when it is too short or another."""
        with self._failing_once():
            if self.missing:
                raise self._skip(
                    Reason.SIZE,
                    f"ends after {self._taken} of the {self._statement.nbytes} bytes it is to have",
                )
            sha256, header = self._reader.finish(), self._reader.header
            if not hmac.compare_digest(sha256, self._statement.sha256):
                raise self._skip(
                    Reason.FRAME,
                    f"has sha256 {sha256} where its statement names {self._statement.sha256}",
                )
        assert header is not None
        return Checked(
            sha256=sha256,
            nbytes=self._taken,
            header=header,
            payload_start=self._taken - header.payload_bytes - frame.TRAILER_BYTES,
            squares=self._norms.squares(),
            norm=self._norms.norm(),
        )

    @contextmanager
    def _failing_once(self) -> Iterator[None]:
        """What is wrong with the frame is a Skip; any error stands from then on."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except ProtocolError as exc:
            self._failure = self._skip(Reason.FRAME, f"is no frame of this window: {exc}")
            raise self._failure from exc
        except BaseException as exc:
            self._failure = exc
            raise

    def _skip(self, reason: Reason, what: str) -> Skip:
        return _skip(reason, f"the object of {self._expected.uid!r} {what}")

    def _check_header(self, header: FrameHeader) -> None:
        """The header again says what the statement says; `wire.frame` has the run's own rules."""
        expected = self._expected
        frame.expect(header, layout=expected.layout, codec=expected.codec, kind="contribution")
        wanted = {
            "run_id": expected.run_id,
            "manifest_sha256": expected.manifest_sha256,
            "worker_id": expected.uid,
            "round": expected.window,
            "base_digest": expected.base_digest,
            "fragment": 0,  # the whole model
        }
        for name, value in wanted.items():
            if (found := getattr(header, name)) != value:
                what = f"has {name}={found!r} in its frame where the window has {value!r}"
                raise self._skip(Reason.FRAME, what)
        if (nbytes := frame.frame_bytes(header)) != self._statement.nbytes:
            what = f"has a frame of {nbytes} bytes where its statement names "
            raise self._skip(Reason.SIZE, f"{what}{self._statement.nbytes}")
        self._check_bound("residual", header.residual)

    def _check_tile(self, span: Span, payload: Tensor) -> None:
        try:
            self._norms.add(span, payload)
        except FrameError as exc:
            raise self._malformed(span, payload) from exc
        norm = self._norms.norm()
        if not math.isfinite(norm):
            codes = self._expected.codec.magnitudes(payload, len(span))
            chunk = span.start // CHUNK + int((codes == NOT_FINITE).any(axis=1).argmax())
            raise self._skip(Reason.TABLE, f"holds NaN or infinity in chunk {chunk}")
        self._check_bound("norm", norm)

    def _malformed(self, span: Span, payload: Tensor) -> Skip:
        chunk, fault = self._expected.codec.first_fault(payload, len(span))
        reason = Reason.TABLE if fault == MAGNITUDES else Reason.INDICES
        return self._skip(reason, f"{FAULTS[fault]} in chunk {span.start // CHUNK + chunk}")

    def _check_bound(self, name: str, value: float) -> None:
        if value > self._expected.norm_bound:
            raise self._skip(
                Reason.NORM,
                f"has {name}={value:.6g}, above {self._expected.norm_bound:.6g}, the most an outer "
                f"step takes",
            )


def begin(
    expected: Expected, document: bytes, public_key: PublicKey, *, tee: Tee | None = None
) -> Validator:
    """The validator of the object that a peer's signed `document` names.

    Skip when the document is none, is not signed by the peer or is not for this window.
    """
    return Validator(expected, statements.read(document, public_key), tee=tee)


def _skip(reason: Reason, sentence: str) -> Skip:
    if len(sentence) > MAX_SENTENCE:
        sentence = f"{sentence[: MAX_SENTENCE - 1]}…"
    return Skip(reason, sentence)
