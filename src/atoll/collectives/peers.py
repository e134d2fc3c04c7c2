"""A rank among its peers: what it may ask of them besides sums, whatever the transport."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.collectives.mailbox import Bytes
from atoll.errors import AtollError, ConfigError, MissingRanks, ProtocolError
from atoll.traffic import Traffic

READ_BYTES = 1 << 20  # the most that a peer sends at a time
ASK_BYTES = 1 << 20  # the most that a peer is told at a time
RETRY_SECONDS = 0.2

T = TypeVar("T")


class Source(Protocol):
    """What a rank lets the others of its group read, by name.

    Called by threads of the transport, several at a time.
    """

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes `[start, stop)` of what has that name, in pieces of any size.

        May wait for something that is being written; NotReady asks the reader to call again.
        BlobMissing for a name that it does not have, and will not.
        """
        ...


class Desk(Protocol):
    """What a rank's server does for the others of its group, whatever this rank computes.

    Called by threads of the transport, several at a time. Who asks is read from the connection.
    """

    def answer(self, sender: int, name: str, body: Bytes) -> bytes:
        """The answer to rank `sender`; `body` is good during the call.

        May wait, at most for as long as a collective. The same may be asked again, where the answer
        was lost, and must then change nothing; NotReady asks the sender to call again.
        """
        ...


@dataclass(frozen=True)
class CountedSource:
    """Fulfils `Source` with what `inner` gives, and counts it as sent."""

    inner: Source
    traffic: Traffic

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        for piece in self.inner.read(name, start, stop):
            self.traffic.sends(len(piece))
            yield piece


@dataclass(frozen=True)
class CountedDesk:
    """Fulfils `Desk` with what `inner` answers, and counts what it is told and says."""

    inner: Desk
    traffic: Traffic

    def answer(self, sender: int, name: str, body: Bytes) -> bytes:
        self.traffic.receives(len(body))
        found = self.inner.answer(sender, name, body)
        self.traffic.sends(len(found))
        return found


class Peers(Collectives, Protocol):
    """The collectives of a rank, and what it reads from its peers and asks of them."""

    def ask(self, rank: int, name: str, body: Bytes = b"") -> bytes:
        """What the desk of rank `rank` answers; asked again where a connection breaks.

        `body` has at most `ASK_BYTES`. MissingRanks once there is no answer for as long as a
        collective may take; what the peer refuses with; what was given with `abort`.
        """
        ...

    def read(self, rank: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Exactly the bytes `[start, stop)` of what rank `rank` has under that name.

        Goes on where it was when a connection breaks. MissingRanks once nothing has come for as
        long as a collective may take; what the peer refuses with; ProtocolError where it sends more
        or less than was asked for; what was given with `abort`.
        """
        ...

    def advance(self, step: int) -> None:
        """This rank begins `step`: what is known of messages before the last one is forgotten."""
        ...

    def close(self) -> None:
        """Leaves the group: what is under way is given up."""
        ...


def check_ask(body: Bytes) -> None:
    """ConfigError for more than a peer takes at a time."""
    if len(body) > ASK_BYTES:
        raise ConfigError(
            f"{len(body)} bytes cannot be told to a rank at a time; at most {ASK_BYTES} are taken"
        )


def answered(opened: Callable[[float], T], *, rank: int, clock: Clock, timeout_seconds: float) -> T:
    """What a peer answers, asked again while an error allows it; then MissingRanks.

    `opened(until)` asks once.
    """
    until = clock.now() + timeout_seconds
    while True:
        try:
            return opened(until)
        except AtollError as error:
            if not error.retry:
                raise
            if clock.now() + RETRY_SECONDS >= until:
                raise MissingRanks(
                    f"rank {rank} did not answer in {timeout_seconds:g} s ({error}); the step is "
                    f"given up",
                    ranks=[rank],
                ) from error
            clock.sleep(RETRY_SECONDS)


@dataclass(frozen=True)
class Pings:
    """How long the way to each peer and back takes."""

    milliseconds: Mapping[int, float]  # by rank, the least of several
    missed: tuple[int, ...]  # the ranks that were not reached


def resumed(
    opened: Callable[[int, float], Iterator[bytes]],
    start: int,
    stop: int,
    *,
    rank: int,
    clock: Clock,
    timeout_seconds: float,
    traffic: Traffic,
) -> Iterator[bytes]:
    """What a peer sends of `[start, stop)`, counted, and asked for again from where it broke off.

    `opened(start, until)` asks for the rest. An error that allows a retry is no progress; after
    `timeout_seconds` without any, MissingRanks.
    """
    if not 0 <= start <= stop:
        raise ConfigError(f"bytes [{start}, {stop}) cannot be read; they end before they start")
    asked, until = start, clock.now() + timeout_seconds
    while start < stop:
        try:
            for piece in opened(start, until):
                start += len(piece)
                traffic.receives(len(piece))
                if start > stop:
                    raise ProtocolError(
                        f"rank {rank} sent {start - asked} bytes and more; {stop - asked} were "
                        f"asked for"
                    )
                yield piece
                until = clock.now() + timeout_seconds
            if start < stop:
                raise ProtocolError(
                    f"rank {rank} sent {start - asked} bytes; {stop - asked} were asked for"
                )
        except AtollError as error:
            if not error.retry:
                raise
            if clock.now() + RETRY_SECONDS >= until:
                raise MissingRanks(
                    f"rank {rank} sent nothing of bytes [{start}, {stop}) in {timeout_seconds:g} s "
                    f"({error}); the rest is not filled in",
                    ranks=[rank],
                ) from error
            clock.sleep(RETRY_SECONDS)
