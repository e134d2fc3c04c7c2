"""One rank of a group over gRPC: its mailbox, its streams and its collectives, as one thing."""

from types import TracebackType
from typing import Self

from atoll.clock import Clock
from atoll.collectives.exchange import CHUNK_BYTES, Exchange, Way
from atoll.collectives.grpc.port import GrpcPort
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.runners import Threaded
from atoll.errors import AtollError, GroupBroken

HELD_CHUNKS = 4  # of each peer, before its stream waits


class RankMember(Exchange):
    """This process as a rank of `group`, from the making until `close`, over its `server`."""

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        server: RankServer,
        *,
        clock: Clock,
        identity: Identity | None = None,
        way: Way = "ring",
        timeout_seconds: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._server = server
        self._box = Mailbox(
            group=group.number,
            rank=rank,
            size=group.size,
            clock=clock,
            limit_bytes=HELD_CHUNKS * chunk_bytes,
        )
        self._streams = GrpcPort(group, rank, identity=identity, clock=clock, failed=self._refused)
        self._thread = Threaded(f"rank-{rank}")
        super().__init__(
            rank=rank,
            size=group.size,
            port=self._streams,
            mailbox=self._box,
            runner=self._thread,
            clock=clock,
            way=way,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
        )
        server.enter(group, self._box)

    def _refused(self, error: AtollError) -> None:
        """A peer takes nothing from this rank any more, so no collective will end."""
        self._box.abort(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group: what is under way is given up."""
        self._server.leave()
        self._box.abort(GroupBroken("this rank has left its group"))
        self._streams.close()
        self._thread.close()
