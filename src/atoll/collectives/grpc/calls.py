"""The calling half of ranged reads and questions between ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from atoll.clock import Clock
from atoll.collectives import peers
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Bytes
from atoll.errors import AtollError, CoordinatorUnreachable
from atoll.traffic import Traffic


class Calls:
    """What one rank reads from its peers and asks of them, until `abort`. Thread-safe."""

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        *,
        identity: Identity | None,
        clock: Clock,
        timeout_seconds: float,
        traffic: Traffic,
    ) -> None:
        self._metadata = group.metadata(rank)
        self._channels = dial.Channels(group, identity)
        self._clock = clock
        self._timeout = timeout_seconds
        self._traffic = traffic
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()
        self._error: Exception | None = None

    def read(self, to: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        """As `peers.Peers.read`."""

        def opened(start: int, until: float) -> Iterator[bytes]:
            request = messages.read_request(name, start, stop)
            with self._begun(to, until, lambda c: c.unary_stream(_path("Read")), request) as call:
                yield from call

        return peers.resumed(
            opened,
            start,
            stop,
            rank=to,
            clock=self._clock,
            timeout_seconds=self._timeout,
            traffic=self._traffic,
        )

    def ask(self, to: int, name: str, body: Bytes) -> bytes:
        """As `peers.Peers.ask`."""
        peers.check_ask(body)
        request = messages.question(name, body)

        def answer(until: float) -> bytes:
            def begin(channel: grpc.Channel) -> Any:
                put: Any = channel.unary_unary(_path("Ask"))
                return put.future

            with self._begun(to, until, begin, request) as call:
                return bytes(call.result())

        found = peers.answered(answer, rank=to, clock=self._clock, timeout_seconds=self._timeout)
        self._traffic.sends(len(body))
        self._traffic.receives(len(found))
        return found

    def abort(self, error: Exception) -> None:
        """Whoever reads or asks, or will, raises `error`; all connections end."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._under_way)
        for call in calls:
            call.cancel()
        self._channels.close()

    @contextmanager
    def _begun(
        self, to: int, until: float, begin: Callable[[grpc.Channel], Any], request: bytes
    ) -> Iterator[Any]:
        """A call that is under way inside; what breaks it comes out as a typed error."""
        with self._lock:
            if self._error is not None:
                raise self._error
            channel = self._channels.to(to)
            left = max(0.001, until - self._clock.now())
            call = begin(channel)(request, metadata=self._metadata, timeout=left)
            self._under_way.add(call)
        try:
            with dial.typed():
                yield call
        except (AtollError, grpc.FutureCancelledError) as error:
            if self._error is not None:
                raise self._error from None
            if isinstance(error, grpc.FutureCancelledError):
                raise CoordinatorUnreachable("the connection of a question was ended") from error
            if isinstance(error, CoordinatorUnreachable):
                with self._lock:  # nobody begins a call on it meanwhile, which gRPC would refuse
                    self._channels.drop(to, channel)
            raise
        finally:
            with self._lock:
                self._under_way.discard(call)
            call.cancel()  # where a reader wants no more


def _path(method: str) -> str:
    return f"/{dial.SERVICE}/{method}"
