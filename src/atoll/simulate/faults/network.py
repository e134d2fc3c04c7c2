"""The network between workers and the coordinator: late, lossy, doubled, cut, one way or both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from atoll.errors import CoordinatorUnreachable
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.world import World

TIMEOUT_SECONDS = 3.0  # after which a worker takes a message for lost
GHOST_SECONDS = 12.0  # a doubled message may come so much later
# Parts of one stream arrive once and in order or not at all; the stream as a whole breaks.
_STREAMED = frozenset({"begin", "write", "commit"})

Deliver = Callable[[Answer], None]


@dataclass(eq=False)
class Network:
    """Carries messages; `cut` names workers and the directions that are cut for them."""

    world: World
    host: Host
    cut: dict[str, frozenset[str]] = field(default_factory=dict)  # worker_id -> of {"to", "from"}
    aside: Callable[[], Call | None] = lambda: None  # what else may be said just now

    def __post_init__(self) -> None:
        self._rng = self.world.stream("network")
        self._numbers = count()
        self._under_way: dict[int, tuple[Call, Deliver]] = {}
        self.host.interleave = self._interleave

    def send(self, call: Call, deliver: Deliver) -> None:
        """Sends a message; `deliver` gets the answer, at most once, or the silence."""
        waiting = [deliver]

        def once(answer: Answer) -> None:
            if waiting:
                waiting.pop()(answer)

        unreachable = Answer(error=CoordinatorUnreachable("no answer in time"))
        self.world.after(TIMEOUT_SECONDS, once, unreachable)
        if self._is_lost(call, "to"):
            return
        self._post(call, once, self._delay())
        is_faulty, duplicate = self.world.is_faulty, self.world.scenario.duplicate
        if is_faulty and call.kind not in _STREAMED and self._rng.random() < duplicate:
            self.world.note("doubled", call.kind)
            self._post(call, lambda _: None, self._rng.uniform(0.0, GHOST_SECONDS))

    def _post(self, call: Call, once: Deliver, delay: float) -> None:
        number = next(self._numbers)
        self._under_way[number] = (call, once)
        self.world.after(delay, self._arrive, number)

    def _arrive(self, number: int) -> None:
        if number in self._under_way:
            self._handle(*self._under_way.pop(number))

    def _handle(self, call: Call, once: Deliver) -> None:
        answer = self.host.handle(call)
        self.world.note(call.kind, f"{call.sender} {answer.word}")
        if not self._is_lost(call, "from"):
            self.world.after(self._delay(), once, answer)

    def _interleave(self) -> None:
        """Some messages that are under way arrive now, while a round closes."""
        waiting = list(self._under_way)
        for number in self._rng.sample(waiting, min(3, len(waiting))):
            call, once = self._under_way.pop(number)
            self.world.note("interleaved", call.kind)
            self._handle(call, once)
        aside = self.aside()
        if aside is not None and not self.cut.get(aside.worker_id):
            self.world.note("interleaved", aside.kind)
            self._handle(aside, lambda _: None)

    def _is_lost(self, call: Call, way: str) -> bool:
        if way in self.cut.get(call.worker_id, ()):
            return True
        if self.world.is_faulty and self._rng.random() < self.world.scenario.loss:
            self.world.note("lost", f"{way} {call.kind}")
            return True
        return False

    def _delay(self) -> float:
        return self._rng.expovariate(1.0) * self.world.scenario.delay_seconds
