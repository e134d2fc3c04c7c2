"""Ranks read ranges of each other on every transport: exactly what was asked for, or an error."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import RankGroup
from atoll.collectives.local import LocalGroup
from atoll.collectives.peers import READ_BYTES, Peers, Source
from atoll.collectives.runners import Inline
from atoll.errors import (
    BlobMissing,
    ConfigError,
    CoordinatorUnreachable,
    Forbidden,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleGeneration,
)
from tests import ranks_on_loopback
from tests.cables import cable

DATA = bytes(range(256)) * (10 << 10)  # 2.5 MiB: several messages


class Stored:
    """A source with one name; can lie about lengths, break off and stand still."""

    def __init__(self, *, more: int = 0, breaks_at: int | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.goes_on = threading.Event()
        self._more = more
        self._breaks_at = breaks_at

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        self.asked.append((start, stop))
        if name == "slow":
            self.goes_on.wait(20)
        elif name == "broken":
            raise OSError("the disk")
        elif name != "save":
            raise BlobMissing(f"name={name!r} is not stored here; ask for 'save'")
        breaks_at, self._breaks_at = self._breaks_at, None
        stop += self._more
        for at in range(start, stop, 100_001):
            if breaks_at is not None and at >= breaks_at:
                raise NotReady("the rest is being written; call again")
            yield (DATA + DATA)[at : min(at + 100_001, stop)]


@contextmanager
def local(source: Source | None, *, timeout_seconds: float = 20.0) -> Iterator[list[Peers]]:
    group = LocalGroup(2, clock=SystemClock())
    options: dict[str, Any] = {"timeout_seconds": timeout_seconds}
    yield [group.rank(0, Inline(), **options), group.rank(1, Inline(), source=source, **options)]


@contextmanager
def over_grpc(
    source: Source | None, *, timeout_seconds: float = 20.0, is_tls: bool = False
) -> Iterator[list[Peers]]:
    with ranks_on_loopback.ranks(
        2,
        is_tls=is_tls,
        timeout_seconds=timeout_seconds,
        source=lambda rank: source if rank == 1 else None,
    ) as made:
        yield list(made)


TRANSPORTS = {"local": local, "grpc": over_grpc, "grpc, TLS": partial(over_grpc, is_tls=True)}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return TRANSPORTS[request.param]


def read(ranks: list[Peers], start: int, stop: int, *, name: str = "save") -> bytes:
    return b"".join(ranks[0].read(1, name, start, stop))


@pytest.mark.parametrize(
    ("start", "stop"), [(0, len(DATA)), (7, 2 * READ_BYTES + 9), (5, 6), (9, 9)], ids=str
)
def test_read_gives_exactly_the_range(transport, start, stop):
    with transport(Stored()) as ranks:
        assert read(ranks, start, stop) == DATA[start:stop]


def test_piece_of_a_read_fits_a_message():
    class Whole:
        def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
            yield DATA[start:stop]

    with over_grpc(Whole()) as ranks:
        lengths = [len(piece) for piece in ranks[0].read(1, "save", 0, len(DATA))]

    assert sum(lengths) == len(DATA)
    assert max(lengths) <= READ_BYTES


def test_read_that_breaks_off_goes_on_where_it_was(transport):
    source = Stored(breaks_at=1_000_000)
    with transport(source) as ranks:
        assert read(ranks, 10, len(DATA)) == DATA[10:]

    first, second = source.asked
    assert first == (10, len(DATA))
    assert second == (10 + 10 * 100_001, len(DATA))


@pytest.mark.parametrize("is_tls", [False, True])
def test_read_over_a_connection_that_is_cut_goes_on_where_it_was(is_tls):
    source = Stored()
    with ranks_on_loopback.servers(2, is_tls=is_tls) as made, ExitStack() as stack:
        wire = stack.enter_context(cable(made.servers[1].address))
        group = made.group_at([made.servers[0].address, wire.address])
        reader = stack.enter_context(made.member(0, group=group, timeout_seconds=20))
        stack.enter_context(made.member(1, group=group, source=source))
        pieces = reader.read(1, "save", 0, len(DATA))
        came = [next(pieces)]
        wire.cut()

        assert b"".join([*came, *pieces]) == DATA

    assert len(source.asked) == 2
    assert source.asked[1][0] >= len(came[0])


@pytest.mark.parametrize("more", [-1, 1])
def test_peer_that_sends_more_or_less_is_refused(transport, more):
    with transport(Stored(more=more)) as ranks, pytest.raises(ProtocolError, match="rank 1 sent"):
        read(ranks, 3, 150_000)


def test_unknown_name_is_refused_by_name(transport):
    with transport(Stored()) as ranks, pytest.raises(BlobMissing, match="name='other'"):
        read(ranks, 0, 10, name="other")


def test_range_that_ends_before_it_starts_is_refused(transport):
    with transport(Stored()) as ranks, pytest.raises(ConfigError, match=r"\[5, 4\)"):
        read(ranks, 5, 4)


def test_peer_that_has_nothing_is_missing_at_the_deadline(transport):
    with (
        transport(None, timeout_seconds=0.5) as ranks,
        pytest.raises(MissingRanks, match="rank 1 sent nothing") as refused,
    ):
        read(ranks, 0, 10)

    assert refused.value.ranks == (1,)


def test_peer_that_stands_still_is_missing_at_the_deadline():
    source = Stored()
    with over_grpc(source, timeout_seconds=0.5) as ranks:
        with pytest.raises(MissingRanks) as refused:
            read(ranks, 0, 10, name="slow")
        source.goes_on.set()

    assert refused.value.ranks == (1,)


def test_accident_of_a_source_is_not_told_and_ends_at_the_deadline():
    with (
        over_grpc(Stored(), timeout_seconds=0.5) as ranks,
        pytest.raises(MissingRanks) as refused,
    ):
        read(ranks, 0, 10, name="broken")

    assert "the disk" not in str(refused.value)


def test_abort_reaches_who_reads_and_who_will():
    source = Stored()
    with over_grpc(source) as ranks, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, ranks, 0, 10, name="slow")
        for _ in iter(lambda: bool(source.asked), True):
            SystemClock().sleep(0.001)  # until the call is under way
        ranks[0].abort(StaleGeneration("group 1 is over"))

        with pytest.raises(StaleGeneration, match="group 1 is over"):
            reading.result(10)
        with pytest.raises(StaleGeneration, match="group 1 is over"):
            read(ranks, 0, 10)
        source.goes_on.set()


def test_rank_that_left_is_missing(transport):
    with transport(Stored(), timeout_seconds=0.5) as ranks:
        ranks[1].close()

        with pytest.raises(MissingRanks):
            read(ranks, 0, 10)


# Strangers


def call(
    made: ranks_on_loopback.Loopback,
    method: str,
    shown: tuple[tuple[str, str], ...],
    request: bytes = messages.read_request("save", 0, 9),
) -> Any:
    with (
        dial.typed(),
        dial.channel(made.group, 1, made.identities[0]) as channel,
    ):
        if method == "Ping":
            ping: Any = channel.unary_unary(f"/{dial.SERVICE}/Ping")
            return ping(b"", metadata=shown, timeout=10)
        ask: Any = channel.unary_stream(f"/{dial.SERVICE}/Read")
        return list(ask(request, metadata=shown, timeout=10))


@pytest.mark.parametrize("method", ["Ping", "Read"])
def test_only_members_of_the_present_group_are_answered(method):
    with ranks_on_loopback.servers(2) as made:
        former, source = made.group, Stored()
        present = made.group_at([m.address for m in former.members], number=3, secret="p" * 32)
        later = made.group_at([m.address for m in former.members], number=4, secret="l" * 32)
        stranger = made.group_at([m.address for m in former.members], number=3, secret="x" * 32)
        with pytest.raises(NotReady):
            call(made, method, former.metadata(0))
        made.servers[1].enter(present, source=source)

        with pytest.raises(StaleGeneration):
            call(made, method, former.metadata(0))
        with pytest.raises(NotReady):
            call(made, method, later.metadata(0))
        with pytest.raises(Forbidden):
            call(made, method, stranger.metadata(0))
        assert source.asked == []
        call(made, method, present.metadata(0))  # the control


@pytest.mark.parametrize("method", ["Ping", "Read"])
def test_certificate_outside_the_group_is_not_answered(method):
    with ranks_on_loopback.servers(3, is_tls=True) as made:
        two = RankGroup(1, made.group.members[1:], ranks_on_loopback.SECRET)
        source = Stored()
        made.servers[1].enter(two, source=source)

        with pytest.raises(CoordinatorUnreachable):
            call(made, method, two.metadata(0))

        assert source.asked == []
        made.servers[1].enter(made.group, source=source)
        call(made, method, made.group.metadata(0))  # the control


@pytest.mark.parametrize(
    "request_", [b"", b"x" * 15, b"\xff" * 17, b"\x01" + bytes(15) + b"save", bytes(16 + 513)]
)
def test_read_that_no_rank_asks_is_refused(request_):
    with ranks_on_loopback.servers(2) as made:
        source = Stored()
        made.servers[1].enter(made.group, source=source)
        with pytest.raises(ProtocolError):
            call(made, "Read", made.group.metadata(0), request_)

        assert source.asked == []
