"""The asking half of questions between ranks."""

import threading
from typing import Any

import grpc

from atoll.clock import Clock
from atoll.collectives import peers
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Bytes
from atoll.errors import AtollError, CoordinatorUnreachable


class Asks:
    """What one rank of a group asks of its peers, until `abort`. Thread-safe."""

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        *,
        identity: Identity | None,
        clock: Clock,
        timeout_seconds: float,
    ) -> None:
        self._metadata = group.metadata(rank)
        self._channels = dial.Channels(group, identity)
        self._clock = clock
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._calls: set[Any] = set()  # under way
        self._error: Exception | None = None

    def ask(self, to: int, name: str, body: Bytes) -> bytes:
        """As `peers.Peers.ask`."""
        peers.check_ask(body)
        request = messages.question(name, body)
        return peers.answered(
            lambda until: self._answer(to, request, until),
            rank=to,
            clock=self._clock,
            timeout_seconds=self._timeout,
        )

    def abort(self, error: Exception) -> None:
        """Whoever asks, or will, raises `error`; all connections end."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._channels.close()

    def _answer(self, to: int, request: bytes, until: float) -> bytes:
        left = max(0.001, until - self._clock.now())
        with self._lock:
            if self._error is not None:
                raise self._error
            channel = self._channels.to(to)
            put: Any = channel.unary_unary(f"/{dial.SERVICE}/Ask")
            call = put.future(request, metadata=self._metadata, timeout=left)
            self._calls.add(call)
        try:
            return _result(call)
        except AtollError as error:
            if self._error is not None:
                raise self._error from None
            if isinstance(error, CoordinatorUnreachable):
                self._channels.drop(to, channel)
            raise
        finally:
            with self._lock:
                self._calls.discard(call)


def _result(call: Any) -> bytes:
    with dial.typed():
        try:
            return bytes(call.result())
        except grpc.FutureCancelledError as over:
            raise CoordinatorUnreachable("the connection of a question was ended") from over
