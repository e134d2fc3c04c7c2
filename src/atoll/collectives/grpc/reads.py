"""The reading half of a ranged read between ranks."""

import threading
from collections.abc import Iterator
from typing import Any

from atoll.clock import Clock
from atoll.collectives import peers
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.errors import AtollError, CoordinatorUnreachable
from atoll.traffic import Traffic


class Reads:
    """What one rank of a group reads from its peers, until `abort`. Thread-safe."""

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
        self._calls: set[Any] = set()  # under way
        self._error: Exception | None = None

    def read(self, to: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        """As `peers.Peers.read`."""

        def opened(start: int, until: float) -> Iterator[bytes]:
            yield from self._answers(to, messages.read_request(name, start, stop), until)

        return peers.resumed(
            opened,
            start,
            stop,
            rank=to,
            clock=self._clock,
            timeout_seconds=self._timeout,
            traffic=self._traffic,
        )

    def abort(self, error: Exception) -> None:
        """Whoever reads, or will, raises `error`."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._channels.close()

    def _answers(self, to: int, request: bytes, until: float) -> Iterator[bytes]:
        with self._lock:
            if self._error is not None:
                raise self._error
            channel = self._channels.to(to)
            ask: Any = channel.unary_stream(f"/{dial.SERVICE}/Read")
            left = max(0.001, until - self._clock.now())
            call = ask(request, metadata=self._metadata, timeout=left)
            self._calls.add(call)
        try:
            with dial.typed():
                yield from call
        except AtollError as error:
            if self._error is not None:
                raise self._error from None
            if isinstance(error, CoordinatorUnreachable):
                self._channels.drop(to, channel)
            raise
        finally:
            with self._lock:
                self._calls.discard(call)
            call.cancel()  # where the reader wants no more
