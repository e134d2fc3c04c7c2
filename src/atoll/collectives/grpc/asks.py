"""The asking half of questions between ranks, and the connections that they go over."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from atoll.clock import Clock
from atoll.collectives import peers
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Bytes
from atoll.errors import AtollError, CoordinatorUnreachable


class Asks:
    """What one rank of a group asks of its peers, until `abort`. Thread-safe.

    Keeps one connection to each peer, since there are many questions; one that broke is replaced.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        *,
        identity: Identity | None,
        clock: Clock,
        timeout_seconds: float,
    ) -> None:
        self._group = group
        self._rank = rank
        self._identity = identity
        self._clock = clock
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}
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
            ends: list[Callable[[], object]] = [call.cancel for call in self._calls]
            ends += [channel.close for channel in self._channels.values()]
            self._channels.clear()
        for end in ends:
            end()

    def _answer(self, to: int, request: bytes, until: float) -> bytes:
        left = max(0.001, until - self._clock.now())
        with self._lock:
            if self._error is not None:
                raise self._error
            if to not in self._channels:
                self._channels[to] = dial.channel(self._group, to, self._identity)
            channel = self._channels[to]
            put: Any = channel.unary_unary(f"/{dial.SERVICE}/Ask")
            call = put.future(request, metadata=self._group.metadata(self._rank), timeout=left)
            self._calls.add(call)
        try:
            return self._result(call)
        except AtollError as error:
            if self._error is not None:
                raise self._error from None
            if isinstance(error, CoordinatorUnreachable):
                self._drop(to, channel)
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    @staticmethod
    def _result(call: Any) -> bytes:
        with dial.typed():
            try:
                return bytes(call.result())
            except grpc.FutureCancelledError as over:
                raise CoordinatorUnreachable("the connection of a question was ended") from over

    def _drop(self, to: int, broken: grpc.Channel) -> None:
        """The next question dials anew: a broken connection waits longer each time."""
        with self._lock:
            if self._channels.get(to) is not broken:
                return
            del self._channels[to]
        broken.close()
