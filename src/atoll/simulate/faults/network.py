"""The network between workers and the coordinator: late, lossy, doubled, cut, one way or both."""

import random
from collections.abc import Callable

from atoll.errors import CoordinatorUnreachable
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.loop import EventLoop
from atoll.simulate.faults.scenario import Scenario

TIMEOUT_SECONDS = 3.0  # after which a worker takes a message for lost
GHOST_SECONDS = 12.0  # a doubled message may come so much later
# Parts of one stream arrive once and in order or not at all; the stream as a whole breaks.
_STREAMED = frozenset({"begin", "write", "commit"})

Deliver = Callable[[Answer], None]


class Network:
    """Carries messages; `cut` names workers and the directions that are cut for them."""

    def __init__(self, scenario: Scenario, loop: EventLoop, host: Host, rng: random.Random) -> None:
        self.cut: dict[str, frozenset[str]] = {}  # worker_id -> of {"to", "from"}
        self.is_faulty = True
        self._scenario = scenario
        self._loop = loop
        self._host = host
        self._rng = rng
        self._under_way: list[tuple[Call, Deliver, list[bool]]] = []
        self.aside: Callable[[], Call | None] = lambda: None  # what else may be said just now
        host.interleave = self._interleave

    def send(self, call: Call, deliver: Deliver) -> None:
        """Sends a message; `deliver` gets the answer, at most once, or the silence."""
        done = [False]

        def once(answer: Answer) -> None:
            if not done[0]:
                done[0] = True
                deliver(answer)

        unreachable = Answer(error=CoordinatorUnreachable("no answer in time"))
        self._loop.after(TIMEOUT_SECONDS, lambda: once(unreachable))
        if self._is_lost(call, "to"):
            return
        self._post(call, once, self._delay())
        if self._is_doubled(call):
            self._loop.note("doubled", call.kind)
            self._post(call, lambda _: None, self._rng.uniform(0.0, GHOST_SECONDS))

    def _post(self, call: Call, once: Deliver, delay: float) -> None:
        handled = [False]
        entry = (call, once, handled)
        self._under_way.append(entry)

        def arrive() -> None:
            self._under_way.remove(entry)
            if not handled[0]:
                self._arrive(call, once)

        self._loop.after(delay, arrive)

    def _arrive(self, call: Call, once: Deliver) -> None:
        answer = self._host.handle(call)
        self._loop.note(
            call.kind, f"{call.sender} {'ok' if answer.error is None else answer.error.code}"
        )
        if not self._is_lost(call, "from"):
            self._loop.after(self._delay(), lambda: once(answer))

    def _interleave(self) -> None:
        """Some messages that are under way arrive now, while a round closes."""
        waiting = [entry for entry in self._under_way if not entry[2][0]]
        for call, once, handled in self._rng.sample(waiting, min(3, len(waiting))):
            handled[0] = True
            self._loop.note("interleaved", call.kind)
            self._arrive(call, once)
        aside = self.aside()
        if aside is not None and not self.cut.get(aside.worker_id):
            self._loop.note("interleaved", aside.kind)
            self._arrive(aside, lambda _: None)

    def _is_lost(self, call: Call, way: str) -> bool:
        if way in self.cut.get(call.worker_id, ()):
            return True
        if self.is_faulty and self._rng.random() < self._scenario.loss:
            self._loop.note("lost", f"{way} {call.kind}")
            return True
        return False

    def _is_doubled(self, call: Call) -> bool:
        return (
            self.is_faulty
            and call.kind not in _STREAMED
            and self._rng.random() < self._scenario.duplicate
        )

    def _delay(self) -> float:
        return self._rng.expovariate(1.0) * self._scenario.delay_seconds
