"""Accepting a contribution: check the header, stream the body, validate, store, record, receipt.

Nothing of the body is read before the header is found good, nothing is visible before the ledger's
transaction, and the receipt comes only after it. A broken upload resumes at its offset.
"""

import hashlib
import hmac
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.blobs.base import Blobs, BlobWriter
from atoll.clock import Clock
from atoll.codecs import finite
from atoll.codecs.base import Codec
from atoll.codecs.blocks import Blocks
from atoll.coordinator.accept.admission import Admission, UploadRequest
from atoll.errors import ContributionError, FrameError, NotFinite
from atoll.layout import TILE_BYTES, Layout, Span
from atoll.ledger.records import AnnouncementRecord, ContributionRecord
from atoll.optim.base import MAX_NORM
from atoll.protocol.messages import Identity
from atoll.strategies.base import Lease
from atoll.wire import frame
from atoll.wire.header import FrameHeader
from atoll.wire.tiles import PayloadTiles

log = logging.getLogger(__name__)

FIRST_STREAM = 1


class PayloadCheck:
    """Decodes a payload as it passes, for its norm and its finiteness. Memory: one small tile.

    Used under the lock of its `Upload`.
    """

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self._codec = codec
        self._square_sum = 0.0
        self._tiles = PayloadTiles(codec, layout, self._check_tile)
        self._values = torch.empty(len(next(layout.tiles(TILE_BYTES))))

    def __call__(self, piece: memoryview) -> None:
        self._tiles(piece)

    def _check_tile(self, span: Span, payload: Tensor) -> None:
        if isinstance(self._codec, Blocks):
            self._codec.check_spelling(payload, len(span))
        fused = self._codec.fused(payload, len(span))
        squares = None if fused is None else fused.square_sum(payload, len(span))
        if squares is None:
            out = self._values[: len(span)]
            squares = finite.square_sum(self._codec.decode(payload, len(span), out=out))
        self._square_sum += squares

    def norm(self) -> float:
        """The displacement's L2 norm; NotFinite when a value is NaN or infinite.

        ContributionError when it is larger than any outer step is to meet.
        """
        if not math.isfinite(self._square_sum):
            raise NotFinite(
                "the contribution holds NaN or infinity; the model is unchanged; check the "
                "island's loss and learning rate"
            )
        norm = math.sqrt(self._square_sum)
        if norm > MAX_NORM:
            raise ContributionError(
                f"norm={norm:.6g} of the contribution is above {MAX_NORM:.6g}, the most an outer "
                f"step takes; the model is unchanged; check the island's loss and learning rate"
            )
        return norm


@dataclass(eq=False)
class Upload:
    """One frame on its way in. Used by one stream at a time; a later stream takes over.

    Whoever uses it holds `lock`: streams have threads of their own.
    """

    request: UploadRequest
    writer: BlobWriter
    check: PayloadCheck
    stream: int = FIRST_STREAM  # the number that may write; an older one is refused
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # The writer hashes what it stores, so each byte is hashed once.
        self._reader = frame.FrameReader(self.check, tee=self.writer)

    @property
    def offset(self) -> int:
        return self._reader.nbytes

    def write(self, chunk: bytes | memoryview) -> None:
        """Hashes, stores and checks the next bytes."""
        announced = self.request.preamble[self.offset :]
        if announced and not announced.startswith(bytes(chunk[: len(announced)])):
            raise FrameError("the frame's header differs from the announced one; send it again")
        self._reader.feed(chunk)

    def finish(self) -> float:
        """Makes the blob durable under its name; returns the displacement's norm."""
        found = self._reader.finish()
        if not hmac.compare_digest(found, self.request.sha256):
            raise FrameError(
                f"the frame's sha256 is {found}, announced was {self.request.sha256}; "
                f"send the frame again"
            )
        norm = self.check.norm()
        self.writer.commit()
        return norm


@dataclass(frozen=True, slots=True)
class UploadStream:
    """One stream's right to write an upload; it ends when a later stream takes over."""

    upload: Upload
    number: int


@dataclass(eq=False)
class Uploads:
    """Uploads under way: at most one per worker and open round. Thread-safe."""

    blobs: Blobs
    admission: Admission
    clock: Clock
    record: Callable[
        [ContributionRecord, FrameHeader, AnnouncementRecord | None], ContributionRecord
    ]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Lease, Upload] = {}  # by the round each was made for, and its worker
        self._recording: set[str] = set()

    def offset(self, request: UploadRequest) -> int:
        """The byte at which this frame resumes; its size when it is accepted already."""
        if self.admission.receipt(request) is not None:
            return request.nbytes
        self.admission.check(request)
        with self._lock:
            upload = self._open.get(_key(request))
            return upload.offset if upload is not None and _same(upload, request) else 0

    def begin(self, request: UploadRequest) -> UploadStream | ContributionRecord:
        """A stream that writes from `request.offset` on, or the record once it is accepted."""
        accepted = self.admission.receipt(request)
        if accepted is not None:
            return accepted
        self.admission.check(request)
        return self._resume(request) if request.offset else self._start(request)

    def _resume(self, request: UploadRequest) -> UploadStream:
        with self._lock:
            upload = self._open.get(_key(request))
        if upload is not None and _same(upload, request):
            # The chunk that an earlier stream is writing counts: the offset is read after it.
            with upload.lock:
                if self._is_open(upload) and upload.offset == request.offset:
                    upload.stream += 1
                    # Bound under the lock: of two that resume at once only the later may write.
                    return UploadStream(upload, upload.stream)
        raise FrameError(
            f"offset={request.offset} is not where an upload of this frame stands; ask for the "
            f"offset and resume there"
        )

    def _start(self, request: UploadRequest) -> UploadStream:
        # The earlier one goes first: its room on the disk may be needed.
        self._replace(_key(request), None)
        # The writer comes last: nobody would abort it if one of the others raised.
        check = PayloadCheck(*self.admission.expected(request.header.round))
        upload = Upload(request, self.blobs.writer(expect_bytes=request.nbytes), check)
        self._replace(_key(request), upload)
        return UploadStream(upload, FIRST_STREAM)

    def write(self, stream: UploadStream, chunk: bytes | memoryview) -> None:
        """Adds a chunk; a frame that turns out bad is dropped whole."""
        upload = stream.upload
        with upload.lock:
            self._check_stream(stream)
            try:
                upload.write(chunk)
            except BaseException:
                self._forget(upload)
                raise

    def commit(
        self, stream: UploadStream, announcement: AnnouncementRecord | None = None
    ) -> ContributionRecord:
        """Validates, stores, records; the returned record carries the receipt."""
        upload = stream.upload
        with upload.lock:
            self._check_stream(stream)
            try:
                # The round may have closed while the body came in.
                self.admission.check_again(upload.request)
                with self._lock:
                    self._recording.add(upload.request.sha256)
                norm = upload.finish()
                made = self._contribution(upload.request, norm)
                return self.record(made, upload.request.header, announcement)
            finally:
                self._forget(upload)
                with self._lock:
                    self._recording.discard(upload.request.sha256)

    def abandon(self, stream: UploadStream) -> None:
        """Drops an upload that will not be finished; harmless when it is over."""
        with stream.upload.lock:
            self._forget(stream.upload)

    def in_flight(self) -> frozenset[str]:
        """Blobs that are stored, or about to be, and not recorded yet: not garbage."""
        with self._lock:
            return frozenset(self._recording)

    def _contribution(self, request: UploadRequest, norm: float) -> ContributionRecord:
        header = request.header
        return ContributionRecord(
            round=header.round,
            worker_id=request.identity.worker_id,
            applied=self.admission.destination(header.round),
            first=header.first or header.round,
            fragment=header.fragment,
            base=header.base_digest or "",
            incarnation=request.identity.incarnation,
            sha256=request.sha256,
            nbytes=request.nbytes,
            weight=header.weight,
            rows=header.rows,
            tokens=header.tokens,
            loss_sum=header.loss_sum,
            norm=norm,
            residual=header.residual,
            carried=header.carried,
            receipt=receipt(request.identity, header.round, request.sha256),
            accepted_wall=self.clock.wall(),
        )

    def _check_stream(self, stream: UploadStream) -> None:
        if stream.number != stream.upload.stream or not self._is_open(stream.upload):
            # A round that closed meanwhile is the better reason: the sender can go on from it.
            self.admission.check_again(stream.upload.request)
            raise FrameError("a later stream of this upload has taken over; ask for the offset")

    def _is_open(self, upload: Upload) -> bool:
        with self._lock:
            return self._open.get(_key(upload.request)) is upload

    def _forget(self, upload: Upload) -> None:
        """Drops an upload whose lock the caller holds."""
        with self._lock:
            if self._open.get(_key(upload.request)) is upload:
                del self._open[_key(upload.request)]
        upload.writer.abort()

    def _replace(self, key: Lease, upload: Upload | None) -> None:
        with self._lock:
            earlier = self._open.pop(key, None)
            if upload is not None:
                self._open[key] = upload
        if earlier is not None:
            # Under its lock: a chunk on its way must not meet a closed file, whose number another
            # file may have by then.
            with earlier.lock:
                earlier.writer.abort()

    def drop_stale(self) -> None:
        """A round closed: forgets the uploads that no open round takes any more."""
        with self._lock:
            keys = list(self._open)
        for key in keys:
            if self.admission.rounds.destination(key[0]) is None:
                self._replace(key, None)


def receipt(identity: Identity, round_number: int, sha256: str) -> str:
    """A receipt that the same contribution always gets."""
    text = f"{identity.run_id}/{round_number}/{identity.worker_id}/{sha256}"
    return hashlib.sha256(text.encode()).hexdigest()


def _key(request: UploadRequest) -> Lease:
    return request.header.round, request.identity.worker_id


def _same(upload: Upload, request: UploadRequest) -> bool:
    """Whether both are the same bytes of the same life of a sender, wherever each began.

    Somebody else may have joined meanwhile: what has arrived is still this sender's.
    """
    mine = upload.request
    identity = request.identity.model_copy(update={"generation": mine.identity.generation})
    return mine == replace(request, identity=identity, offset=mine.offset)
