"""The seam between an island and its coordinator.

Every method raises a typed error from `atoll.errors`; `CoordinatorUnreachable` means that nobody
answered and that the same call may be repeated. Implementations: `network` (HTTP and gRPC) and the
simulator's in-memory one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.errors import FrameError
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


class FrameSource(Protocol):
    """A persisted frame, readable at any offset."""

    @property
    def preamble(self) -> bytes: ...

    @property
    def sha256(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...


@dataclass
class DownloadProgress:
    """How far a download has come, so that it can resume."""

    tag: str = ""
    offset: int = 0

    def opened(self, tag: str, offset: int) -> None:
        """The answer is frame `tag` from `offset`; FrameError when that is no resumption."""
        if self.offset and (tag, offset) != (self.tag, self.offset):
            raise FrameError(
                f"the frame {self.tag!r} was at byte {self.offset} when the coordinator went on "
                f"to {tag!r}; the weights are fetched whole"
            )
        self.tag = tag


class Attendance(Protocol):
    """An open presence stream."""

    def wait(self) -> None:
        """Returns when the coordinator or `close` ended it; a typed error when it broke."""
        ...

    def close(self) -> None:
        """Ends it, from any thread."""
        ...


class Link(Protocol):
    """What an island asks of its coordinator."""

    def info(self) -> Info: ...

    def look(self) -> Info:
        """`info` from any thread: in an island of several ranks the leader's alone."""
        ...

    def register(self, request: RegisterRequest) -> RegisterReply: ...

    def come_back(self, request: RegisterRequest) -> RegisterReply:
        """`register` from any thread: in an island of several ranks the leader's alone."""
        ...

    def leave(self, identity: Identity) -> None: ...

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply: ...

    def attend(self, identity: Identity) -> Attendance:
        """Opens a presence stream: while it lasts, the coordinator knows that this island lives."""
        ...

    def barrier(self, name: str, request: BarrierRequest) -> BarrierReply:
        """Arrives at a barrier of the identity's generation and waits there for the others."""
        ...

    def assignment(self, request: AssignmentRequest) -> Assignment: ...

    def evaluation(self, report: EvaluationReport) -> None: ...

    def samples(self, request: SamplesRequest) -> None: ...

    def upload(
        self, identity: Identity, frame: FrameSource, *, before_commit: Callable[[], None]
    ) -> str:
        """Sends the frame, resuming where an earlier try broke off; returns the receipt.

        `before_commit` is called once all bytes are sent and before the coordinator is asked to
        accept them: the moment by which the island's own copy must be durable.
        """
        ...

    def download(
        self,
        identity: Identity,
        *,
        have_digest: str,
        progress: DownloadProgress,
        sink: Callable[[bytes | memoryview], None],
    ) -> None:
        """Streams the frame that leads from `have_digest` to the current version into `sink`.

        `progress` is kept up to date; the same call with the same progress and sink resumes a
        broken stream. FrameError when the coordinator now offers another frame than the one begun.
        """
        ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def close(self) -> None: ...
