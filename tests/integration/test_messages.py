"""A message is one class and one handler: every transport carries it without being told."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import ManualClock
from atoll.coordinator import handlers
from atoll.coordinator.handlers import Arrival
from atoll.errors import AtollError, Forbidden, ProtocolError, UnknownWorker
from atoll.island.link.base import Link
from atoll.island.link.led import LedLink
from atoll.island.ranks.group import SoloGroup
from atoll.protocol import exchange
from atoll.protocol.exchange import Ask, Route, Waiting
from atoll.protocol.fields import Message, Whole, WorkerName
from atoll.simulate.link import MemoryLink
from tests import served
from tests.served import Served


class Echo(Message):
    said: str
    looks: Whole


class EchoRequest(Waiting[Echo], route=Route("POST", "/echo/{worker_id}")):
    """Says it again, once it was looked at so often."""

    worker_id: WorkerName
    said: str
    looks: Whole = 1

    def is_answered(self, reply: Echo) -> bool:
        return reply.looks >= self.looks


class WhisperRequest(Ask[Echo], route=Route("GET", "/whisper", sender="admin", leader_alone=True)):
    """The leader's alone, and an admin's."""

    said: str = "psst"


class Leader(SoloGroup):
    """Rank 0 of 2; notes what it leads."""

    size = 2

    def __init__(self) -> None:
        self.led: list[Any] = []

    def lead(self, work: Callable[[], Any]) -> Any:
        self.led.append(work())
        return self.led[-1]


class Follower(SoloGroup):
    """Rank 1 of 2, which is told what the leader got."""

    rank, size, is_leader = 1, 2, False

    def __init__(self, told: str) -> None:
        self.told = told

    def lead(self, _: Callable[[], Any]) -> Any:
        return self.told


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    looks: list[Arrival] = []

    def echo(coordinator: Any, message: EchoRequest, arrival: Arrival) -> Echo:
        if message.said == "who":
            coordinator.refused(UnknownWorker())
            raise UnknownWorker
        looks.append(arrival)
        assert arrival.again == (len(looks) > 1)
        return Echo(said=message.said, looks=len(looks))

    table: dict[Any, Any] = handlers.HANDLERS
    monkeypatch.setitem(table, EchoRequest, echo)
    monkeypatch.setitem(table, WhisperRequest, lambda _, m, __: Echo(said=m.said, looks=1))
    with served.serving(tmp_path) as made:
        yield made


@pytest.fixture(params=["http", "memory", "led"])
def link(request: pytest.FixtureRequest, coordinator: Served) -> Link:
    memory = MemoryLink(lambda: coordinator.coordinator, ManualClock())
    made: dict[str, Link] = {
        "http": coordinator.link(),
        "memory": memory,
        "led": LedLink(Leader(), memory),
    }
    return made[request.param]


def test_new_message_is_carried_by_every_link(link: Link) -> None:
    reply = link.send(EchoRequest(worker_id="a", said="hello"))

    assert reply == Echo(said="hello", looks=1)


def test_refusal_of_a_new_message_is_its_typed_error(link: Link) -> None:
    with pytest.raises(UnknownWorker):
        link.send(EchoRequest(worker_id="a", said="who"))


def test_message_that_waits_is_looked_at_again_until_it_is_answered(link: Link) -> None:
    request = EchoRequest(worker_id="a", said="hello", looks=2, wait_seconds=0.2)

    reply = link.send(request)

    assert reply.looks == 2


def test_follower_gets_the_answer_of_the_leader(coordinator: Served) -> None:
    leader, request = Leader(), EchoRequest(worker_id="a", said="hello")
    memory = MemoryLink(lambda: coordinator.coordinator, ManualClock())
    reply = LedLink(leader, memory).send(request)

    follower = LedLink(Follower(leader.led[0]), None)

    assert follower.send(request) == reply


@pytest.mark.parametrize("alone", [True, False])
def test_message_of_the_leader_alone_is_not_led(coordinator: Served, alone: bool) -> None:
    leader = Leader()
    link = LedLink(leader, MemoryLink(lambda: coordinator.coordinator, ManualClock()))

    link.send(EchoRequest(worker_id="a", said="hello"), alone=True) if alone else link.send(
        WhisperRequest()
    )

    assert leader.led == []


def test_follower_cannot_send_what_is_the_leaders_alone(coordinator: Served) -> None:
    follower = LedLink(Follower("nothing"), None)

    with pytest.raises(AtollError, match="only the leader calls"):
        follower.send(WhisperRequest())


def test_message_for_admins_is_refused_to_workers(coordinator: Served) -> None:
    with pytest.raises(Forbidden):
        coordinator.link().send(WhisperRequest())

    assert coordinator.client().send(WhisperRequest(said="a b&c")).said == "a b&c"


def test_path_that_differs_from_the_body_is_refused_and_counted(
    coordinator: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = coordinator.coordinator.counters.refusals[ProtocolError.code]
    monkeypatch.setattr(EchoRequest, "target", lambda _: "/echo/b")

    with pytest.raises(ProtocolError, match="names worker_id 'b', the body 'a'; they must agree"):
        coordinator.link().send(EchoRequest(worker_id="a", said="hello"))

    assert coordinator.coordinator.counters.refusals[ProtocolError.code] == before + 1


def test_every_message_has_a_handler_and_every_handler_a_message() -> None:
    known = {kind for kind in exchange.TABLE.values() if kind.__module__.startswith("atoll.")}

    assert known == set(handlers.HANDLERS)


def test_two_messages_cannot_have_one_route() -> None:
    with pytest.raises(AssertionError, match="is the route of"):

        class Second(Ask[Echo], route=Route("GET", "/info")):
            pass
