"""The sending half of a rank: a stream to each peer, dialled again where it breaks."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory
from atoll.collectives.base import Label
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.outbox import Ask, Outbox, Stream
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.errors import AtollError, MissingRanks

log = logging.getLogger(__name__)

LINGER_SECONDS = 1.0


class Carrier(Protocol):
    """How messages get to a peer's mailbox."""

    def carry(self, to: int, outbox: Outbox) -> None:
        """One stream, until it breaks or the outbox is closed.

        Raises what the peer refuses with, and CoordinatorUnreachable when it is not reached.
        """
        ...


class StreamPort:
    """Fulfils `exchange.Port` for one rank of one group; `failed` hears what ends one for good.

    A thread for each peer that was sent something.
    """

    def __init__(
        self, carrier: Carrier, *, clock: Clock, failed: Callable[[AtollError], None]
    ) -> None:
        self._carrier = carrier
        self._clock = clock
        self._failed = failed
        self._peers: dict[int, tuple[Outbox, threading.Thread]] = {}
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def send(self, to: int, label: Label, values: Tensor) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if to not in self._peers:
                self._peers[to] = self._begun(to)
            outbox, _ = self._peers[to]
        outbox.put(label, values)

    def _begun(self, to: int) -> tuple[Outbox, threading.Thread]:
        outbox = Outbox(self._clock)
        name = f"to-rank-{to}"
        thread = threading.Thread(target=self._work, args=(to, outbox), name=name, daemon=True)
        thread.start()
        return outbox, thread

    def flush(self, *, until: float) -> None:
        late = [to for to, (outbox, _) in self._peers.items() if not outbox.flushed(until)]
        if late and self._error is not None:
            raise self._error
        if late:
            raise MissingRanks(
                f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not take what was "
                f"sent in time; the step is given up",
                ranks=late,
            )

    def drop(self) -> None:
        """Peers that are not at fault have a moment to take theirs."""
        until = self._clock.now() + LINGER_SECONDS
        with self._lock:
            peers = list(self._peers.values())
        for outbox, _ in peers:
            outbox.linger(until)
        for outbox, _ in peers:
            outbox.drop()

    def abort(self, error: Exception) -> None:
        """Whoever sends, or waits until all is answered, raises `error`."""
        with self._lock:
            self._error = self._error or error
            peers = list(self._peers.values())
        for outbox, _ in peers:
            outbox.give_up()

    def close(self) -> None:
        """Ends all streams, with whatever was not sent."""
        peers = list(self._peers.values())
        for outbox, _ in peers:
            outbox.close()
        for _, thread in peers:
            thread.join()

    def _work(self, to: int, outbox: Outbox) -> None:
        while True:
            outbox.wait_wanted()  # a peer that leaves when all is sent is not called again
            if outbox.is_closed:
                return
            try:
                self._carrier.carry(to, outbox)
            except AtollError as error:
                if not error.retry and not outbox.is_closed:
                    about = {"peer": to, "code": error.code, "reason": str(error)}
                    log.warning("a peer refuses this rank", extra=about)
                    self._failed(error)
                    return
            outbox.wait_closed(dial.REDIAL_SECONDS)


class GrpcCarrier:
    """Fulfils `Carrier` with a gRPC stream, which reads from the outbox as the peer takes."""

    def __init__(self, group: RankGroup, rank: int, *, identity: Identity | None) -> None:
        self._group = group
        self._rank = rank
        self._identity = identity

    def carry(self, to: int, outbox: Outbox) -> None:
        with (
            dial.typed(),
            dial.channel(self._group, to, self._identity) as channel,
            outbox.stream() as stream,
        ):
            deliver: Any = channel.stream_stream(f"/{dial.SERVICE}/Deliver")
            call = deliver(_parts(stream), metadata=self._group.metadata(self._rank))
            stream.cut_by(call.cancel)
            for answer in call:
                stream.answered(messages.count_of(answer))


def _parts(stream: Stream) -> Iterator[bytes]:
    """gRPC's own thread asks for them; that of a broken stream ends when it next looks."""
    while (message := stream.next()) is not None:
        if isinstance(message, Ask):
            yield messages.ASK
        else:
            label, values = message
            with stream.reading() as is_there:
                if not is_there:
                    return
                part = messages.packed(label, memory.bytes_of(values))
            yield part
