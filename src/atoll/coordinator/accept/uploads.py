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
from dataclasses import dataclass, replace

import numpy as np
import torch

from atoll.blobs.base import Blobs, BlobWriter
from atoll.clock import Clock
from atoll.codecs import finite
from atoll.codecs.base import Codec
from atoll.coordinator.accept.admission import Admission, UploadRequest
from atoll.errors import ContributionError, FrameError, NotFinite
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import Identity
from atoll.strategies.base import Lease
from atoll.wire import frame
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)

FIRST_STREAM = 1
CHECK_GROUPS = 4  # groups decoded at a time while validating: 1 MiB of fp32
# No outer step can overflow from it: its square (Adam), a rate of 100 on momentum of 1e9 rounds of
# it, and a sum of 10,000 of them weighted by 1e15 tokens are all fp32 numbers. A model has left
# every use long before.
MAX_NORM = 1e18


class PayloadCheck:
    """Decodes a payload as it passes, for its norm and its finiteness. Memory: one small tile.

    Used under the lock of its `Upload`.
    """

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self._codec = codec
        self._left = layout.size
        self._square_sum = 0.0
        self._buffer = np.empty(codec.encoded_bytes(GROUP_ELEMENTS * CHECK_GROUPS), np.uint8)
        self._values = torch.empty(GROUP_ELEMENTS * CHECK_GROUPS)
        self._filled = 0
        self._expect()

    def _expect(self) -> None:
        self._elements = min(self._left, GROUP_ELEMENTS * CHECK_GROUPS)
        self._wanted = self._codec.encoded_bytes(self._elements)

    def __call__(self, piece: memoryview) -> None:
        while piece:
            taken = min(len(piece), self._wanted - self._filled)
            self._buffer[self._filled : self._filled + taken] = np.frombuffer(
                piece[:taken], np.uint8
            )
            self._filled += taken
            piece = piece[taken:]
            if self._filled == self._wanted:
                self._check_tile()

    def _check_tile(self) -> None:
        payload = torch.from_numpy(self._buffer[: self._wanted])
        fused = self._codec.fused(payload, self._elements)
        squares = None if fused is None else fused.square_sum(payload, self._elements)
        if squares is None:
            out = self._values[: self._elements]
            squares = finite.square_sum(self._codec.decode(payload, self._elements, out=out))
        self._square_sum += squares
        self._left -= self._elements
        self._filled = 0
        self._expect()

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
                f"norm={norm:.6g} of the contribution is above {MAX_NORM:.6g}, the most that an "
                f"outer step takes; the model is unchanged; check the island's loss and learning "
                f"rate"
            )
        return norm


class Upload:
    """One frame on its way in. Used by one stream at a time; a later stream takes over.

    Whoever uses it holds `lock`: streams have threads of their own.
    """

    def __init__(
        self, request: UploadRequest, header: FrameHeader, writer: BlobWriter, check: PayloadCheck
    ) -> None:
        self.request = request
        self.header = header
        self.stream = FIRST_STREAM  # the number that may write; an older one is refused
        self.lock = threading.Lock()
        self._writer = writer
        self._check = check
        # The writer hashes what it stores, so each byte is hashed once.
        self._reader = frame.FrameReader(check, tee=writer)

    @property
    def offset(self) -> int:
        return self._reader.nbytes

    def write(self, chunk: bytes | memoryview) -> None:
        """Hashes, stores and checks the next bytes."""
        start = self.offset
        announced = self.request.preamble[start:]
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
        norm = self._check.norm()
        self._writer.commit()
        return norm

    def abort(self) -> None:
        """Drops what has arrived."""
        self._writer.abort()


@dataclass(frozen=True, slots=True)
class UploadStream:
    """One stream's right to write an upload; it ends when a later stream takes over."""

    upload: Upload
    number: int


class Uploads:
    """Uploads under way: at most one per worker and open round. Thread-safe."""

    def __init__(
        self,
        blobs: Blobs,
        admission: Admission,
        clock: Clock,
        *,
        record: Callable[[ContributionRecord, FrameHeader], ContributionRecord],
    ) -> None:
        self._blobs = blobs
        self._admission = admission
        self._clock = clock
        self._record = record
        self._lock = threading.Lock()
        self._open: dict[Lease, Upload] = {}  # by the round each was made for, and its worker
        self._recording: set[str] = set()

    def offset(self, request: UploadRequest) -> int:
        """Where this very frame resumes; all of it when it is accepted already."""
        if self._admission.receipt(request) is not None:
            return request.nbytes
        self._admission.check(request)
        with self._lock:
            upload = self._open.get(_key(request))
            return upload.offset if upload is not None and _same(upload, request) else 0

    def begin(self, request: UploadRequest) -> UploadStream | ContributionRecord:
        """The stream that writes from `request.offset`, or the record if it is accepted already."""
        accepted = self._admission.receipt(request)
        if accepted is not None:
            return accepted
        header = self._admission.check(request)
        return self._resume(request) if request.offset else self._start(request, header)

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

    def _start(self, request: UploadRequest, header: FrameHeader) -> UploadStream:
        # The earlier one goes first: its room on the disk may be needed.
        self._replace(_key(request), None)
        upload = Upload(
            request,
            header,
            self._blobs.writer(expect_bytes=request.nbytes),
            PayloadCheck(*self._admission.expected(header.round)),
        )
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

    def commit(self, stream: UploadStream) -> ContributionRecord:
        """Validates, stores, records; the returned record carries the receipt."""
        upload = stream.upload
        with upload.lock:
            self._check_stream(stream)
            try:
                # The round may have closed while the body came in.
                self._admission.check_again(upload.request)
                with self._lock:
                    self._recording.add(upload.request.sha256)
                norm = upload.finish()
                return self._record(self._contribution(upload, norm), upload.header)
            finally:
                self._forget(upload)
                with self._lock:
                    self._recording.discard(upload.request.sha256)

    def in_flight(self) -> frozenset[str]:
        """Blobs that are stored, or about to be, and not recorded yet: not garbage."""
        with self._lock:
            return frozenset(self._recording)

    def _contribution(self, upload: Upload, norm: float) -> ContributionRecord:
        header, request = upload.header, upload.request
        applied = self._admission.destination(header.round)
        if applied is None:
            raise self._admission.stale(header.round)
        return ContributionRecord(
            round=header.round,
            worker_id=request.identity.worker_id,
            applied=applied,
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
            receipt=receipt(request.identity, header.round, request.sha256),
            accepted_wall=self._clock.wall(),
        )

    def _check_stream(self, stream: UploadStream) -> None:
        if stream.number != stream.upload.stream or not self._is_open(stream.upload):
            # A round that closed meanwhile is the better reason: the sender can go on from it.
            self._admission.check_again(stream.upload.request)
            raise FrameError("a later stream of this upload has taken over; ask for the offset")

    def _is_open(self, upload: Upload) -> bool:
        with self._lock:
            return self._open.get(_key(upload.request)) is upload

    def _forget(self, upload: Upload) -> None:
        """Drops an upload whose lock the caller holds."""
        with self._lock:
            if self._open.get(_key(upload.request)) is upload:
                del self._open[_key(upload.request)]
        upload.abort()

    def _replace(self, key: Lease, upload: Upload | None) -> None:
        with self._lock:
            earlier = self._open.pop(key, None)
            if upload is not None:
                self._open[key] = upload
        if earlier is not None:
            # Under its lock: a chunk on its way must not meet a closed file, whose number another
            # file may have by then.
            with earlier.lock:
                earlier.abort()

    def drop_stale(self) -> None:
        """A round closed: forgets the uploads that no open round takes any more."""
        with self._lock:
            keys = list(self._open)
        for key in keys:
            if self._admission.destination(key[0]) is None:
                self._replace(key, None)


def receipt(identity: Identity, round_number: int, sha256: str) -> str:
    """A receipt that the same contribution always gets."""
    text = f"{identity.run_id}/{round_number}/{identity.worker_id}/{sha256}"
    return hashlib.sha256(text.encode()).hexdigest()


def _key(request: UploadRequest) -> Lease:
    header, _ = frame.parse_preamble(request.preamble)
    return header.round, request.identity.worker_id


def _same(upload: Upload, request: UploadRequest) -> bool:
    """Whether both are the same bytes of the same life of a sender, wherever each began.

    Somebody else may have joined meanwhile: what has arrived is still this sender's.
    """
    mine = upload.request
    identity = request.identity.model_copy(update={"generation": mine.identity.generation})
    return mine == replace(request, identity=identity, offset=mine.offset)
