"""The leader's link as every rank of an island sees it: one call, one answer or error for all.

So session, reconnection and the training loop run unchanged on all ranks, in step. Followers hold
no connection, no token and no island key; what they pass as a request is not looked at.
"""

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from atoll.errors import AtollError
from atoll.island.link.base import Attendance, DownloadProgress, FrameSource, Link
from atoll.island.ranks.group import Group
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

M = TypeVar("M", bound=BaseModel)


class LedLink:
    """Fulfils `link.Link`; `link` is the real one on the leader and None on followers."""

    def __init__(self, group: Group, link: Link | None) -> None:
        self._group = group
        self._link = link

    def info(self) -> Info:
        """The settings, as the leader got them."""
        return self._message(Info, lambda: self._real.info())

    def look(self) -> Info:
        """The leader's alone, from a thread of its own."""
        return self._real.info()

    def register(self, request: RegisterRequest) -> RegisterReply:
        """The leader's registration is the island's."""
        return self._message(RegisterReply, lambda: self._real.register(request))

    def come_back(self, request: RegisterRequest) -> RegisterReply:
        """The leader's alone, from a thread of its own."""
        return self._real.register(request)

    def leave(self, identity: Identity) -> None:
        """The island takes part no more."""
        self._group.lead(lambda: self._real.leave(identity))

    def assignment(self, request: AssignmentRequest) -> Assignment:
        """What the island does next, on every rank."""
        return self._message(Assignment, lambda: self._real.assignment(request))

    def evaluation(self, report: EvaluationReport) -> None:
        """The leader's report; sums over ranks are made before."""
        self._group.lead(lambda: self._real.evaluation(report))

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """The leader's alone, from a thread of its own."""
        return self._real.heartbeat(request)

    def samples(self, request: SamplesRequest) -> None:
        """The leader's alone, from a thread of its own."""
        self._real.samples(request)

    def attend(self, identity: Identity) -> Attendance:
        """The leader's alone, from a thread of its own."""
        return self._real.attend(identity)

    def barrier(self, name: str, request: BarrierRequest) -> BarrierReply:
        """The leader stands for the island."""
        return self._message(BarrierReply, lambda: self._real.barrier(name, request))

    def upload(
        self, identity: Identity, frame: FrameSource, *, before_commit: Callable[[], None]
    ) -> str:
        """The leader's alone: called within `lead`."""
        return self._real.upload(identity, frame, before_commit=before_commit)

    def download(
        self,
        identity: Identity,
        *,
        have_digest: str,
        progress: DownloadProgress,
        sink: Callable[[bytes | memoryview], None],
    ) -> None:
        """The leader's alone: called within `lead`."""
        self._real.download(identity, have_digest=have_digest, progress=progress, sink=sink)

    @property
    def bytes_sent(self) -> int:
        return 0 if self._link is None else self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return 0 if self._link is None else self._link.bytes_received

    def close(self) -> None:
        """Closes the leader's connections."""
        if self._link is not None:
            self._link.close()

    @property
    def _real(self) -> Link:
        if self._link is None:
            raise AtollError(
                f"rank {self._group.rank} holds no link to the coordinator; only the leader calls"
            )
        return self._link

    def _message(self, kind: type[M], call: Callable[[], M]) -> M:
        return kind.model_validate_json(self._group.lead(lambda: call().model_dump_json()))
