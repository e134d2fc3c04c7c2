"""The in-memory link: an island's calls land on the coordinator object, at virtual time."""

from collections.abc import Callable

from atoll.clock import Clock
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.service import Coordinator
from atoll.errors import CoordinatorUnreachable
from atoll.island.link.base import DownloadProgress, FrameSource
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    BarrierReply,
    BarrierRequest,
    EvaluationReport,
    HeartbeatReply,
    HeartbeatRequest,
    Identity,
    Info,
    RegisterReply,
    RegisterRequest,
)
from atoll.protocol.samples import SamplesRequest

CHUNK_BYTES = 1 << 20
PEER = "127.0.0.1"
POLL_SECONDS = 0.05  # virtual: how finely a waiting island looks again


class MemoryLink:
    """Calls without a network; messages take no virtual time.

    `reach` gives the coordinator, or raises CoordinatorUnreachable while it is away.
    """

    def __init__(self, reach: Callable[[], Coordinator], clock: Clock) -> None:
        self._reach = reach
        self._clock = clock
        self._sent = 0
        self._received = 0

    @property
    def _coordinator(self) -> Coordinator:
        return self._reach()

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def bytes_received(self) -> int:
        return self._received

    def close(self) -> None:
        """Nothing is open."""

    def info(self) -> Info:
        return self._coordinator.info()

    def look(self) -> Info:
        return self.info()

    def register(self, request: RegisterRequest) -> RegisterReply:
        return self._coordinator.register(request, peer=PEER)

    def come_back(self, request: RegisterRequest) -> RegisterReply:
        return self.register(request)

    def leave(self, identity: Identity) -> None:
        self._coordinator.deregister(identity)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        return self._coordinator.heartbeat(request)

    def attend(self, identity: Identity) -> "MemoryAttendance":
        return MemoryAttendance(self._reach, self._clock, identity)

    def barrier(self, name: str, request: BarrierRequest) -> BarrierReply:
        deadline = self._clock.now() + request.wait_seconds
        while True:
            reply = self._coordinator.barrier(request.identity.generation, name, request)
            if reply.complete or self._clock.now() >= deadline:
                return reply
            self._clock.sleep(POLL_SECONDS)

    def assignment(self, request: AssignmentRequest) -> Assignment:
        deadline = self._clock.now() + request.wait_seconds
        begun = False
        while True:
            reply = self._coordinator.assignment(request, begun=begun)
            begun = True
            if reply.answers(request) or self._clock.now() >= deadline:
                return reply
            self._clock.sleep(POLL_SECONDS)

    def evaluation(self, report: EvaluationReport) -> None:
        self._coordinator.evaluation(report)

    def samples(self, request: SamplesRequest) -> None:
        self._coordinator.keep_samples(request)

    def upload(
        self, identity: Identity, frame: FrameSource, *, before_commit: Callable[[], None]
    ) -> str:
        request = UploadRequest(identity, frame.preamble, frame.sha256, frame.nbytes)
        stream = self._coordinator.begin_upload(request)
        if isinstance(stream, ContributionRecord):
            return stream.receipt
        for offset in range(0, frame.nbytes, CHUNK_BYTES):
            data = frame.read(offset, CHUNK_BYTES)
            self._coordinator.write_upload(stream, data)
            self._sent += len(data)
        before_commit()
        return self._coordinator.commit_upload(stream).receipt

    def download(
        self,
        identity: Identity,
        *,
        have_digest: str,
        progress: DownloadProgress,
        sink: Callable[[bytes | memoryview], None],
    ) -> None:
        spooled = self._coordinator.download(identity, have_digest=have_digest)
        progress.opened(spooled.tag, progress.offset if spooled.tag == progress.tag else 0)
        while progress.offset < spooled.nbytes:
            data = spooled.read(progress.offset, CHUNK_BYTES)
            sink(data)
            progress.offset += len(data)
            self._received += len(data)
            self._coordinator.sent(identity, len(data))


class MemoryAttendance:
    """A presence stream on the virtual clock; a fiber that is stopped while it waits drops it."""

    def __init__(self, reach: Callable[[], Coordinator], clock: Clock, identity: Identity) -> None:
        self._reach = reach
        self._coordinator = reach()
        self._clock = clock
        self._closed = False
        self._stream = self._coordinator.attend(identity, close=self.close)

    def wait(self) -> None:
        try:
            while not self._closed:
                self._clock.sleep(POLL_SECONDS)
                if self._reach() is not self._coordinator:
                    raise CoordinatorUnreachable("the coordinator of this stream is gone")
        finally:
            self._coordinator.absent(self._stream)

    def close(self) -> None:
        self._closed = True
