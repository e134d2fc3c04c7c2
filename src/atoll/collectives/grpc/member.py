"""One rank of a group over gRPC: its mailbox, its streams and its collectives, as one thing."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self

from atoll.clock import Clock
from atoll.collectives.exchange import CHUNK_BYTES, Exchange, Way
from atoll.collectives.grpc.calls import Calls
from atoll.collectives.grpc.port import Carrier, GrpcCarrier, StreamPort
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.tcp import TcpCarrier
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Bytes, Mailbox
from atoll.collectives.peers import CountedDesk, CountedSource, Desk, Source
from atoll.collectives.runners import Threaded
from atoll.errors import AtollError, GroupBroken
from atoll.traffic import Traffic

Bulk = Literal["grpc", "tcp"]
CARRIERS: dict[Bulk, Callable[..., Carrier]] = {"grpc": GrpcCarrier, "tcp": TcpCarrier}
HELD_CHUNKS = 2  # of each peer, before its stream waits


class RankMember(Exchange):
    """Fulfils `peers.Peers`: this process as a rank of `group`, over its `server`, until `close`.

    The others read from `source` and ask at `desk`. Messages travel in gRPC streams or, with
    `bulk="tcp"`, over sockets that gRPC calls opened. What goes between ranks is counted in
    `traffic`.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        server: RankServer,
        *,
        clock: Clock,
        identity: Identity | None = None,
        source: Source | None = None,
        desk: Desk | None = None,
        way: Way = "ring",
        timeout_seconds: float = 60.0,
        bulk: Bulk = "grpc",
        chunk_bytes: int = CHUNK_BYTES,
        traffic: Traffic | None = None,
    ) -> None:
        traffic = Traffic() if traffic is None else traffic
        self._server = server
        self._box = Mailbox(
            group=group.number,
            rank=rank,
            size=group.size,
            clock=clock,
            limit_bytes=HELD_CHUNKS * chunk_bytes,
        )
        carrier = CARRIERS[bulk](group, rank, identity=identity)
        self._streams = StreamPort(carrier, clock=clock, failed=self._refused)
        self._calls = Calls(
            group,
            rank,
            identity=identity,
            clock=clock,
            timeout_seconds=timeout_seconds,
            traffic=traffic,
        )
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
            traffic=traffic,
        )
        offered = None if source is None else CountedSource(source, traffic)
        asked = None if desk is None else CountedDesk(desk, traffic)
        server.enter(group, self._box, source=offered, desk=asked)

    def read(self, rank: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        return self._calls.read(rank, name, start, stop)

    def ask(self, rank: int, name: str, body: Bytes = b"") -> bytes:
        return self._calls.ask(rank, name, body)

    def advance(self, step: int) -> None:
        self._box.advance(step)

    def abort(self, error: Exception) -> None:
        self._box.abort(error)
        self._streams.abort(error)
        self._calls.abort(error)

    def _refused(self, error: AtollError) -> None:
        """A peer takes nothing from this rank any more, so no collective will end."""
        self.abort(error)

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
        self.abort(GroupBroken("this rank has left its group"))
        self._streams.close()
        self._thread.close()
