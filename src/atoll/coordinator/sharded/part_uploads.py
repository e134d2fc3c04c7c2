"""Parts of a checkpoint on their way in: resumable, hashed, of a size that is known before.

Whether a part is wanted at all is checked before any of its body is read. A part that has come in
whole is a blob; it counts once its rank reports it.
"""

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from atoll.blobs.base import Blobs, BlobWriter
from atoll.errors import FrameError, FrameTooLarge, StoreError
from atoll.protocol.messages import Identity

FIRST_STREAM = 1
Key = tuple[int, str]  # round, worker_id


@dataclass(frozen=True)
class PartRequest:
    """What a rank says before it sends its part."""

    identity: Identity
    group: int
    round: int
    sha256: str
    nbytes: int
    offset: int = 0


@dataclass(eq=False)
class PartUpload:
    """One part on its way in; whoever uses it holds `lock`: streams have threads of their own."""

    request: PartRequest
    writer: BlobWriter
    stream: int = FIRST_STREAM  # the number that may write; an older one is refused
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class PartStream:
    """One stream's right to write an upload; it ends when a later stream takes over."""

    upload: PartUpload
    number: int


@dataclass(eq=False)
class PartUploads:
    """Uploads under way: at most one per rank. Thread-safe."""

    blobs: Blobs
    admit: Callable[[PartRequest], None]  # raises for a part that is not wanted

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, PartUpload] = {}
        self._stored: dict[str, int] = {}  # blobs that are whole and not recorded yet: their rounds
        self._claimed: dict[Key, str] = {}  # blobs that ranks were told are stored already
        self._sweep = threading.Lock()  # held while blobs that nobody needs are removed

    def offset(self, request: PartRequest) -> int:
        """The byte at which this part resumes; its size when it is stored already."""
        self.admit(request)
        if self.claims(_key(request), request.sha256, request.nbytes):
            return request.nbytes
        with self._lock:
            upload = self._open.get(_key(request))
        if upload is None or not _same(upload, request):
            return 0
        with upload.lock:
            return upload.writer.nbytes if upload.writer.is_open else 0

    def begin(self, request: PartRequest) -> PartStream | None:
        """A stream that writes from `request.offset` on; None when the part is stored already."""
        self.admit(request)
        if self.claims(_key(request), request.sha256, request.nbytes):
            return None
        return self._resume(request) if request.offset else self._start(request)

    def _start(self, request: PartRequest) -> PartStream:
        # The earlier one goes first: its room on the disk may be needed.
        self._replace(_key(request), None)
        upload = PartUpload(request, self.blobs.writer(expect_bytes=request.nbytes))
        self._replace(_key(request), upload)
        return PartStream(upload, FIRST_STREAM)

    def _resume(self, request: PartRequest) -> PartStream:
        with self._lock:
            upload = self._open.get(_key(request))
        if upload is not None and _same(upload, request):
            with upload.lock:
                if self._is_open(upload) and upload.writer.nbytes == request.offset:
                    upload.stream += 1
                    return PartStream(upload, upload.stream)
        raise FrameError(
            f"offset={request.offset} is not where an upload of this part stands; ask for the "
            f"offset and resume there"
        )

    def write(self, stream: PartStream, chunk: bytes | memoryview) -> None:
        """Adds a chunk; more than was announced drops the part whole."""
        upload = stream.upload
        with upload.lock:
            self._check(stream)
            try:
                announced = upload.request.nbytes
                if upload.writer.nbytes + len(chunk) > announced:
                    raise FrameTooLarge(
                        f"the part is longer than the announced nbytes={announced}; send it again"
                    )
                upload.writer.write(chunk)
            except BaseException:
                self._forget(upload)
                raise

    def commit(self, stream: PartStream) -> None:
        """Makes the part a durable blob; FrameError unless it is what was announced."""
        upload, request = stream.upload, stream.upload.request
        with upload.lock:
            self._check(stream)
            writer = upload.writer
            if writer.nbytes < request.nbytes:
                raise FrameError(
                    f"the part has {writer.nbytes} of {request.nbytes} bytes; resume there"
                )
            try:
                self.admit(request)  # its group may be over by now
                found = writer.digest()
                if not hmac.compare_digest(found, request.sha256):
                    raise FrameError(
                        f"the part's sha256 is {found}, announced was {request.sha256}; send it "
                        f"again"
                    )
                with self._lock:
                    self._stored[request.sha256] = request.round
                writer.commit()
            finally:
                self._forget(upload)

    def claims(self, key: Key, sha256: str, nbytes: int) -> bool:
        """Whether a blob of that name and size is there, whole and right; then it stays.

        Said before it is looked for: a sweep that is under way is over by then, a later one knows.
        """
        with self._sweep, self._lock:
            self._claimed[key] = sha256
        is_stored = self._is_stored(sha256, nbytes)
        if not is_stored:
            with self._lock:
                if self._claimed.get(key) == sha256:
                    del self._claimed[key]
        return is_stored

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """Nobody is told meanwhile that a blob is stored: it may be about to be removed."""
        with self._sweep:
            yield

    def _is_stored(self, sha256: str, nbytes: int) -> bool:
        try:
            with self.blobs.open(sha256) as reader:
                return reader.nbytes == nbytes
        except StoreError:
            return False

    def in_flight(self) -> frozenset[str]:
        """Blobs that are stored, or about to be, and not recorded yet: not garbage."""
        with self._lock:
            return frozenset(self._stored) | frozenset(self._claimed.values())

    def committed(self, round_number: int) -> None:
        """A checkpoint is recorded: parts for it and for earlier ones are of no use any more."""
        with self._lock:
            self._stored = {s: r for s, r in self._stored.items() if r > round_number}
            self._claimed = {k: s for k, s in self._claimed.items() if k[0] > round_number}
            keys = [key for key in self._open if key[0] <= round_number]
        for key in keys:
            self._replace(key, None)

    def _check(self, stream: PartStream) -> None:
        if stream.number != stream.upload.stream or not self._is_open(stream.upload):
            self.admit(stream.upload.request)  # the better reason, where it is one
            raise FrameError("a later stream of this part has taken over; ask for the offset")

    def _is_open(self, upload: PartUpload) -> bool:
        with self._lock:
            return self._open.get(_key(upload.request)) is upload

    def _forget(self, upload: PartUpload) -> None:
        """Drops an upload whose lock the caller holds."""
        with self._lock:
            if self._open.get(_key(upload.request)) is upload:
                del self._open[_key(upload.request)]
        upload.writer.abort()

    def _replace(self, key: Key, upload: PartUpload | None) -> None:
        with self._lock:
            earlier = self._open.pop(key, None)
            if upload is not None:
                self._open[key] = upload
        if earlier is not None:
            with earlier.lock:  # a chunk on its way must not meet a closed file
                earlier.writer.abort()


def _key(request: PartRequest) -> Key:
    return request.round, request.identity.worker_id


def _same(upload: PartUpload, request: PartRequest) -> bool:
    """Whether both are the same bytes of the same life of a sender, wherever each began."""
    mine = upload.request
    identity = request.identity.model_copy(update={"generation": mine.identity.generation})
    return mine == replace(request, identity=identity, offset=mine.offset)
