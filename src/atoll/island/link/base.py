"""The seam between an island and its coordinator.

Every method raises a typed error from `atoll.errors`; `CoordinatorUnreachable` means that nobody
answered and that the same call may be repeated. Implementations: `network` (HTTP and gRPC) and the
simulator's in-memory one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel

from atoll.errors import FrameError
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Identity
from atoll.traffic import Traffic

R = TypeVar("R", bound=BaseModel)
Work = Callable[[], None]


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


@dataclass(frozen=True)
class Download:
    """The frame that an island wants next, and where its bytes go: an intent of the conversation.

    It gets the round's frame where that applies to `have_digest` and is the newest of the part of
    the model that the round carries. Else, and for round 0, it gets the current weights whole.
    """

    identity: Identity
    round_number: int  # the one that follows what the island has; 0: it needs all
    have_digest: str  # of the part that the round carries
    progress: DownloadProgress
    sink: Callable[[bytes | memoryview], object]


class Attendance(Protocol):
    """An open presence stream."""

    def wait(self) -> None:
        """Returns when the coordinator or `close` ended it; a typed error when it broke."""
        ...

    def close(self) -> None:
        """Ends it, from any thread."""
        ...


class Link(Protocol):
    """What an island asks of its coordinator: messages of the table, frames, and presence."""

    traffic: Traffic

    def send(self, message: Ask[R], *, alone: bool = False) -> R:
        """The answer to `message`.

        In an island of several ranks they all send in step and get the leader's answer. With
        `alone`, and where the message is the leader's alone by its nature, only the leader sends:
        from any thread, beside the training.
        """
        ...

    def attend(self, identity: Identity) -> Attendance:
        """Opens a presence stream: while it lasts, the coordinator knows that this island lives."""
        ...

    def upload(self, identity: Identity, frame: FrameSource, *, before_commit: Work) -> str:
        """Sends the frame, resuming where an earlier try broke off; returns the receipt.

        `before_commit` is called once all bytes are sent and before the coordinator is asked to
        accept them: the moment by which the island's own copy must be durable.
        """
        ...

    def download(self, wanted: Download) -> None:
        """Streams the frame that is `wanted` into its sink.

        Its progress is kept up to date; a call with the same progress and sink resumes a broken
        stream. FrameError when the coordinator now offers another frame than the one begun.
        """
        ...

    def close(self) -> None: ...
