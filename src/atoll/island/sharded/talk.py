"""Messages of a rank to its coordinator, from any of its threads: they outlive absences."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from atoll.clock import Clock
from atoll.island.conversation.intents import Steps, send
from atoll.island.conversation.session import Session
from atoll.island.driver import Driver
from atoll.island.link.rank import RankLink
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Identity

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class Talk:
    """Asks until there is an answer; `Over` once `is_over`, so that nobody waits for nothing."""

    def __init__(
        self,
        session: Session,
        link: RankLink,
        clock: Clock,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session = session
        self._link = link
        self._clock = clock
        self._driver = Driver(link, clock, alone=True)
        self._driver.is_over = is_over

    def until(self, is_over: Callable[[], bool]) -> "Talk":
        """The same, for somebody who gives up sooner."""
        return Talk(self._session, self._link, self._clock, is_over=is_over)

    def ask(self, make: Callable[[Identity], Ask[R]]) -> R:
        """The answer to what `make` gives; it is made anew for every try."""
        return self._calls(lambda who: send(make(who)))

    def carry(self, work: Callable[[RankLink, Identity], T]) -> T:
        """What `work` does over the link, again and again while its error may pass."""

        def steps(who: Identity) -> Steps[T]:
            yield from ()
            return work(self._link, who)

        return self._calls(steps)

    def register_again(self) -> None:
        """Begins a new life, which ends the group that the old one was in."""
        self._driver.run(self._session.register_again())

    def _calls(self, make: Callable[[Identity], Steps[T]]) -> T:
        session = self._session
        return self._driver.run(session.call(lambda: make(session.standing.identity())))
