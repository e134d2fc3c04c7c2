"""The in-memory link: an island's calls land on the coordinator object, at virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import BaseModel

from atoll.clock import Clock
from atoll.coordinator import handlers
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.authority import Authority
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.service import Coordinator
from atoll.coordinator.sharded.part_uploads import PartRequest
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.errors import CoordinatorUnreachable
from atoll.island.link.base import Download, FrameSource, Work
from atoll.island.link.rank import Part
from atoll.ledger.records import ContributionRecord
from atoll.protocol.exchange import Ask, Waiting
from atoll.protocol.messages import Identity
from atoll.traffic import Traffic
from atoll.wire import chunks

PEER = "127.0.0.1"
POLL_SECONDS = 0.05  # virtual: how finely a waiting island looks again

R = TypeVar("R", bound=BaseModel)


@dataclass(eq=False)
class MemoryLink:
    """Calls without a network; messages take no virtual time.

    `reach` gives the coordinator, or raises CoordinatorUnreachable while it is away.
    """

    reach: Callable[[], Authority]
    clock: Clock
    traffic: Traffic = field(default_factory=Traffic)

    def close(self) -> None:
        """Nothing is open."""

    def send(self, message: Ask[R], *, alone: bool = False) -> R:  # noqa: ARG002  # always
        wait_seconds = message.wait_seconds if isinstance(message, Waiting) else 0.0
        deadline = self.clock.now() + wait_seconds
        arrival = Arrival(PEER)
        while True:
            reply = handlers.answer(self.reach(), message, arrival)
            if message.is_answered(reply) or self.clock.now() >= deadline:
                return reply
            arrival = replace(arrival, again=True)
            self.clock.sleep(POLL_SECONDS)

    def upload_part(self, identity: Identity, part: Part) -> None:
        asked = PartRequest(identity, part.group, part.round, part.sha256, part.nbytes)
        offset = self._sharded().part_offset(asked)
        stream = self._sharded().begin_part(replace(asked, offset=offset))
        if stream is None:
            return
        for start in range(offset, part.nbytes, chunks.CHUNK_BYTES):
            data = part.read(start, min(chunks.CHUNK_BYTES, part.nbytes - start))
            self._sharded().write_part(stream, data)
            self.traffic.sent += len(data)
        self._sharded().commit_part(stream)

    def fetch(self, identity: Identity, sha256: str, *, offset: int, nbytes: int) -> bytes:
        with self._sharded().fetch(identity, sha256, offset, nbytes) as reader:
            data = reader.read(offset, nbytes)
        self.traffic.received += len(data)
        return data

    def _sharded(self) -> ShardedCoordinator:
        return handlers.check_kind(self.reach(), ShardedCoordinator, "a part of a checkpoint")

    def _of_rounds(self) -> Coordinator:
        return handlers.check_kind(self.reach(), Coordinator, "a contribution")

    def attend(self, identity: Identity) -> "MemoryAttendance":
        return MemoryAttendance(self.reach, self.clock, identity)

    def upload(self, identity: Identity, frame: FrameSource, *, before_commit: Work) -> str:
        request = UploadRequest(identity, frame.preamble, frame.sha256, frame.nbytes)
        stream = self._of_rounds().begin_upload(request)
        if isinstance(stream, ContributionRecord):
            return stream.receipt
        for offset in range(0, frame.nbytes, chunks.CHUNK_BYTES):
            data = frame.read(offset, chunks.CHUNK_BYTES)
            self._of_rounds().write_upload(stream, data)
            self.traffic.sent += len(data)
        before_commit()
        return self._of_rounds().commit_upload(stream).receipt

    def download(self, wanted: Download) -> None:
        identity, progress = wanted.identity, wanted.progress
        spooled = self._of_rounds().download(
            identity, round_number=wanted.round_number, have_digest=wanted.have_digest
        )
        progress.opened(spooled.tag, progress.offset if spooled.tag == progress.tag else 0)
        while progress.offset < spooled.nbytes:
            data = spooled.read(progress.offset, chunks.CHUNK_BYTES)
            wanted.sink(data)
            progress.offset += len(data)
            self.traffic.received += len(data)
            self._of_rounds().sent(identity, len(data))


class MemoryAttendance:
    """A presence stream on the virtual clock; a fiber that is stopped while it waits drops it."""

    def __init__(self, reach: Callable[[], Authority], clock: Clock, identity: Identity) -> None:
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
