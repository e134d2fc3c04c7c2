"""Links of tests: what a message is called, a link that answers by methods of these names, slow
ones of simulations, and a session whose conversation is driven in the thread that calls.
"""

import random
from collections.abc import Callable
from typing import Any, TypeVar

from atoll.clock import Clock, ManualClock
from atoll.island.conversation import backoff
from atoll.island.conversation import session as sessions
from atoll.island.conversation.intents import Steps
from atoll.island.conversation.session import Session
from atoll.island.driver import Driver
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.store import IslandIdentity
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import (
    AssignmentRequest,
    EvaluationReport,
    HeartbeatRequest,
    InfoRequest,
    LeaveRequest,
    RegisterRequest,
)
from atoll.protocol.samples import SamplesRequest
from atoll.simulate.link import MemoryLink
from atoll.traffic import Traffic

T = TypeVar("T")

NAMES: dict[type[Ask[Any]], str] = {
    InfoRequest: "info",
    RegisterRequest: "register",
    AssignmentRequest: "assignment",
    EvaluationReport: "evaluation",
    HeartbeatRequest: "heartbeat",
    SamplesRequest: "samples",
    LeaveRequest: "leave",
}


class Answering:
    """A link whose `send` asks its own method of the message's name."""

    traffic = Traffic()
    sent_alone = 0

    def send(self, message: Ask[Any], *, alone: bool = False) -> Any:
        self.sent_alone += alone
        return getattr(self, NAMES[type(message)])(message)


class SlowLink(MemoryLink):
    """Everything takes a while, never the same."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._chance = random.Random(7)

    def _wait(self) -> None:
        self.clock.sleep(self._chance.uniform(0.0, 1.5))  # virtual; a step takes 0.1

    def send(self, *given: Any, **more: Any) -> Any:
        self._wait()
        return super().send(*given, **more)

    def upload(self, *given: Any, **more: Any) -> str:
        self._wait()
        receipt = super().upload(*given, **more)
        self._wait()
        return receipt

    def download(self, *given: Any) -> None:
        self._wait()
        super().download(*given)
        self._wait()


class LateReceipts(MemoryLink):
    """What is handed in is there at once; the word of it comes when its round is long merged."""

    def upload(self, *given: Any, **more: Any) -> str:
        receipt = super().upload(*given, **more)
        self.clock.sleep(1.0)
        return receipt


class Driven:
    """A session over `link`; its steps are gone until they end, and what sends is plain work."""

    def __init__(
        self,
        link: Any,
        *,
        group: Group = SOLO,
        clock: Clock | None = None,
        worker_id: str = "a",
        seed: int = 0,
    ) -> None:
        jitter = random.Random(seed)
        self.driver = Driver(link, clock or ManualClock(), group)
        self.session = Session(
            IslandIdentity(worker_id, "1" * 64),
            self.driver.run(sessions.look(jitter)),
            jitter,
            group=group,
        )
        self.standing = self.session.standing

    def register(self, **model_and_data: Any) -> None:
        self.driver.run(self.session.register(**model_and_data))

    def call(self, work: Callable[[], T]) -> T:
        return self.driver.run(self.session.call(_steps_of(work)))

    def try_once(self, work: Callable[[], T]) -> T:
        return self.driver.run(self.session.try_once(_steps_of(work)))

    def leave(self) -> None:
        self.driver.run(self.session.leave())

    def refresh(self) -> bool:
        return self.driver.run(self.session.refresh())

    @property
    def is_registered(self) -> bool:
        return self.session.is_registered


def _steps_of(work: Callable[[], T]) -> Callable[[], Steps[T]]:
    def steps() -> Steps[T]:
        yield from ()
        return work()

    return steps


def repeated(work: Callable[[], T], clock: Clock, jitter: random.Random) -> T:
    """What `work` gives in the end, with the pauses of an absence on `clock`."""
    link: Any = Answering()
    return Driver(link, clock).run(backoff.repeated(_steps_of(work), jitter))
