"""Ranks ask at each other's desks on every transport: who asks is known, and errors are typed."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.trust import RANK_KEY
from atoll.collectives.local import LocalGroup
from atoll.collectives.peers import ASK_BYTES, Desk, Peers
from atoll.collectives.runners import Inline
from atoll.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleGeneration,
)
from tests import ranks_on_loopback
from tests.cables import cable


class Answering:
    """A desk that keeps what it was asked."""

    def __init__(self, refuse: Callable[[int], None] = lambda _: None) -> None:
        self.asked: list[tuple[int, str, bytes]] = []
        self.goes_on = threading.Event()
        self._refuse = refuse

    def answer(self, sender: int, name: str, body: Any) -> bytes:
        self.asked.append((sender, name, bytes(body)))
        if name == "slow":
            self.goes_on.wait(20)
        if name == "broken":
            raise OSError("the disk")
        self._refuse(len(self.asked))
        return f"{sender} asked {name}".encode() + bytes(body)


@contextmanager
def local(desk: Desk | None, *, timeout_seconds: float = 20.0) -> Iterator[list[Peers]]:
    group = LocalGroup(3, clock=SystemClock())
    options: dict[str, Any] = {"timeout_seconds": timeout_seconds}
    desks = (None, desk, None)
    yield [group.rank(k, Inline(), desk=one, **options) for k, one in enumerate(desks)]


@contextmanager
def over_grpc(
    desk: Desk | None, *, timeout_seconds: float = 20.0, is_tls: bool = False
) -> Iterator[list[Peers]]:
    with ranks_on_loopback.servers(3, is_tls=is_tls) as made, ExitStack() as stack:
        yield [
            stack.enter_context(
                made.member(k, desk=desk if k == 1 else None, timeout_seconds=timeout_seconds)
            )
            for k in range(3)
        ]


TRANSPORTS = {"local": local, "grpc": over_grpc, "grpc, TLS": partial(over_grpc, is_tls=True)}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return TRANSPORTS[request.param]


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 4096], ids=len)
def test_desk_knows_who_asks_and_gets_what_was_said(transport, body):
    desk = Answering()
    with transport(desk) as ranks:
        answers = [ranks[k].ask(1, "what", body) for k in (0, 2)]

    assert answers == [b"0 asked what" + body, b"2 asked what" + body]
    assert desk.asked == [(0, "what", body), (2, "what", body)]


def test_more_than_a_message_takes_is_refused_before_it_is_sent(transport):
    desk = Answering()
    with transport(desk) as ranks, pytest.raises(ConfigError, match="at most"):
        ranks[0].ask(1, "what", bytes(ASK_BYTES + 1))

    assert desk.asked == []


def test_refusal_comes_back_as_the_error_that_it_is(transport):
    def refuse(_: int) -> None:
        raise Conflict("other bytes came before")

    desk = Answering(refuse)
    with transport(desk) as ranks, pytest.raises(Conflict, match="other bytes came before"):
        ranks[0].ask(1, "what")

    assert len(desk.asked) == 1


def test_desk_that_is_not_ready_is_asked_again(transport):
    def refuse(times: int) -> None:
        if times < 3:
            raise NotReady("call again")

    desk = Answering(refuse)
    with transport(desk) as ranks:
        assert ranks[0].ask(1, "what") == b"0 asked what"

    assert len(desk.asked) == 3


def test_rank_without_a_desk_is_missing_at_the_deadline(transport):
    with (
        transport(None, timeout_seconds=0.5) as ranks,
        pytest.raises(MissingRanks) as refused,
    ):
        ranks[0].ask(1, "what")

    assert refused.value.ranks == (1,)


def test_rank_that_left_is_missing(transport):
    with transport(Answering(), timeout_seconds=0.5) as ranks:
        ranks[0].ask(1, "what")  # the control, and a connection that is open
        ranks[1].close()

        with pytest.raises(MissingRanks):
            ranks[0].ask(1, "what")


def test_desk_that_stands_still_is_missing_at_the_deadline():
    desk = Answering()
    with over_grpc(desk, timeout_seconds=0.5) as ranks:
        with pytest.raises(MissingRanks) as refused:
            ranks[0].ask(1, "slow")
        desk.goes_on.set()

    assert refused.value.ranks == (1,)


def test_accident_of_a_desk_is_not_told():
    with over_grpc(Answering(), timeout_seconds=0.5) as ranks, pytest.raises(MissingRanks) as told:
        ranks[0].ask(1, "broken")

    assert "the disk" not in str(told.value)


@pytest.mark.parametrize("is_tls", [False, True])
def test_question_whose_connection_is_cut_is_asked_again(is_tls):
    desk = Answering()
    with ranks_on_loopback.servers(2, is_tls=is_tls) as made, ExitStack() as stack:
        wire = stack.enter_context(cable(made.servers[1].address))
        group = made.group_at([made.servers[0].address, wire.address])
        asker = stack.enter_context(made.member(0, group=group, timeout_seconds=20))
        stack.enter_context(made.member(1, group=group, desk=desk))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        asking = pool.submit(asker.ask, 1, "slow")
        for _ in iter(lambda: bool(desk.asked), True):
            SystemClock().sleep(0.001)  # until the question is there, unanswered
        wire.cut()
        for _ in iter(lambda: len(desk.asked) > 1, True):
            SystemClock().sleep(0.001)
        desk.goes_on.set()

        assert asking.result(10) == b"0 asked slow"

    assert desk.asked == [(0, "slow", b"")] * len(desk.asked)


def test_abort_reaches_who_asks_and_who_will():
    desk = Answering()
    with over_grpc(desk) as ranks, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ranks[0].ask, 1, "slow")
        for _ in iter(lambda: bool(desk.asked), True):
            SystemClock().sleep(0.001)  # until the call is under way
        ranks[0].abort(StaleGeneration("group 1 is over"))

        with pytest.raises(StaleGeneration, match="group 1 is over"):
            asking.result(10)
        with pytest.raises(StaleGeneration, match="group 1 is over"):
            ranks[0].ask(1, "what")
        desk.goes_on.set()


# Strangers


def put(made: ranks_on_loopback.Loopback, shown: Any, request: bytes, *, by: int = 0) -> bytes:
    with dial.typed(), dial.channel(made.group, 1, made.identities[by]) as channel:
        ask: Any = channel.unary_unary(f"/{dial.SERVICE}/Ask")
        return bytes(ask(request, metadata=shown, timeout=10))


def test_only_members_of_the_present_group_are_answered():
    question = messages.question("what", b"")
    with ranks_on_loopback.servers(2) as made:
        former, desk = made.group, Answering()
        addresses = [m.address for m in former.members]
        present = made.group_at(addresses, number=3, secret="p" * 32)
        stranger = made.group_at(addresses, number=3, secret="x" * 32)
        with pytest.raises(NotReady):
            put(made, former.metadata(0), question)
        made.servers[1].enter(present, desk=desk)

        with pytest.raises(StaleGeneration):
            put(made, former.metadata(0), question)
        with pytest.raises(Forbidden):
            put(made, stranger.metadata(0), question)
        assert desk.asked == []
        put(made, present.metadata(0), question)  # the control


def test_certificate_says_who_asks_whatever_the_caller_says():
    with ranks_on_loopback.servers(3, is_tls=True) as made:
        desk = Answering()
        made.servers[1].enter(made.group, desk=desk)
        lies = [(k, "0" if k == RANK_KEY else v) for k, v in made.group.metadata(2)]

        put(made, tuple(lies), messages.question("what", b""), by=2)

    assert desk.asked == [(2, "what", b"")]


@pytest.mark.parametrize("request_", [b"", b"x", b"\x05\x00", b"\xff\xff\x02\x00", b"x" * 600])
def test_question_that_no_rank_asks_is_refused(request_):
    with ranks_on_loopback.servers(2) as made:
        desk = Answering()
        made.servers[1].enter(made.group, desk=desk)
        with pytest.raises(ProtocolError):
            put(made, made.group.metadata(0), request_)

    assert desk.asked == []
