"""The sending half of a rank: a stream to each peer, dialled again where it breaks.

A message is kept until the peer has said that it lies in its mailbox. When a stream breaks, what
was not answered is sent again on the next one; the mailbox knows what it has.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory
from atoll.collectives.base import Label
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.errors import AtollError, CoordinatorUnreachable, MissingRanks
from atoll.wire import rpc

log = logging.getLogger(__name__)


class GrpcPort:
    """Fulfils `exchange.Port` for one rank of one group; `failed` hears what ends one for good.

    A thread for each peer that was sent something: it writes, gRPC reads from it as the peer takes
    it, so nothing is copied before its turn.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        *,
        identity: Identity | None,
        clock: Clock,
        failed: Callable[[AtollError], None],
    ) -> None:
        self._group = group
        self._rank = rank
        self._identity = identity
        self._clock = clock
        self._failed = failed
        self._streams: dict[int, _Stream] = {}

    def send(self, to: int, label: Label, values: Tensor) -> None:
        if to not in self._streams:
            self._streams[to] = _Stream(self, to)
        self._streams[to].put(label, values)

    def flush(self, *, until: float) -> None:
        late = [to for to, stream in self._streams.items() if not stream.flushed(until)]
        if late:
            raise MissingRanks(
                f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not take what was "
                f"sent in time; the step is given up",
                ranks=late,
            )

    def close(self) -> None:
        """Ends all streams, with whatever was not sent."""
        for stream in self._streams.values():
            stream.close()

    def channel(self, to: int) -> grpc.Channel:
        """A connection to a peer."""
        return dial.channel(self._group, to, self._identity)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What this rank shows."""
        return self._group.metadata(self._rank)

    @property
    def clock(self) -> Clock:
        return self._clock

    def fail(self, to: int, error: AtollError) -> None:
        """A peer refuses this rank: no stream to it will do."""
        about = {"peer": to, "code": error.code, "reason": str(error)}
        log.warning("a peer refuses this rank", extra=about)
        self._failed(error)


class _Stream:
    """What goes to one peer, in order."""

    def __init__(self, port: GrpcPort, to: int) -> None:
        self._port = port
        self._to = to
        self._changed = threading.Condition()
        self._kept: deque[tuple[Label, Tensor]] = deque()  # not answered yet, oldest first
        self._written = 0  # how many of them are on the present stream
        self._number = 0  # of the present stream
        self._is_closed = False
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._work, name=f"to-rank-{to}", daemon=True)
        self._thread.start()

    def put(self, label: Label, values: Tensor) -> None:
        with self._changed:
            self._kept.append((label, values))
            self._changed.notify_all()

    def flushed(self, until: float) -> bool:
        """Whether all is answered, at the latest at the time `until`."""
        clock = self._port.clock
        left = max(0.0, until - clock.now())
        return clock.wait_for(lambda: not self._kept, self._changed, seconds=left)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()
        self._thread.join()

    # The stream's own thread

    def _work(self) -> None:
        while not self._is_closed:
            try:
                with self._port.channel(self._to) as channel:
                    self._stream(channel)
            except grpc.RpcError as broken:
                error = rpc.error_of(broken)
                if not isinstance(error, CoordinatorUnreachable) and not error.retry:
                    self._port.fail(self._to, error)
                    return
            with self._changed:
                self._number += 1  # nobody takes messages for the stream that broke
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, dial.REDIAL_SECONDS)

    def _stream(self, channel: grpc.Channel) -> None:
        """One stream until it breaks."""
        deliver: Any = channel.stream_stream(f"/{dial.SERVICE}/Deliver")
        with self._changed:
            self._written, self._number = 0, self._number + 1
            parts = self._parts(self._number)
            self._call = call = deliver(parts, metadata=self._port.metadata)
        for _ in call:
            with self._changed:
                self._kept.popleft()
                self._written -= 1
                self._changed.notify_all()

    def _parts(self, number: int) -> Iterator[bytes]:
        """The messages from the first that was not answered on; gRPC's own thread asks for them.

        That of a broken stream takes none: it ends when it next looks.
        """

        def is_over() -> bool:
            return self._is_closed or self._number != number

        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_over() or self._written < len(self._kept))
                if is_over():
                    return
                label, values = self._kept[self._written]
                self._written += 1
            yield messages.packed(label, memory.bytes_of(values))
