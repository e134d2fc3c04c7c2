"""The world of one simulated run: one thread, a virtual clock, a hash of all that happened.

Nothing here reads a real clock or unseeded randomness, so a seed gives one history.
"""

import hashlib
import heapq
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from atoll.simulate.faults.scenario import Scenario

WALL_START = 1_700_000_000.0
LAST_LINES = 40


class World:
    """Events in the order of their time; equal times in the order of their making."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.is_faulty = True  # until the faults end
        self.now = 0.0
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.lines: deque[str] = deque(maxlen=LAST_LINES)  # the newest, for a report
        self.away: dict[str, float] = {}  # servers of buckets, by name: until when
        self._queue: list[tuple[float, int, partial[None]]] = []
        self._order = itertools.count()
        self._trace = hashlib.sha256()

    def has(self, kind: str) -> bool:
        """Whether faults of this kind are made now."""
        return self.is_faulty and self.scenario.has(kind)

    def stream(self, name: str) -> random.Random:
        """Random numbers of their own for one part, whatever the other parts draw."""
        return random.Random(f"{name} {self.scenario.seed}")

    def after(self, seconds: float, work: Callable[..., None], *given: object) -> None:
        """Calls `work` with what is given, so much later."""
        event = (self.now + max(0.0, seconds), next(self._order), partial(work, *given))
        heapq.heappush(self._queue, event)

    def note(self, kind: str, detail: str = "") -> None:
        """Adds a line to the history and counts its kind."""
        self.counts[kind] += 1
        line = f"{self.now:.6f} {kind} {detail}"
        self.lines.append(line)
        self._trace.update(line.encode() + b"\n")

    def turn(self) -> None:
        """Does the next event."""
        self.now, _, work = heapq.heappop(self._queue)
        self.events += 1
        work()

    @property
    def trace(self) -> str:
        """The hash of the history so far."""
        return self._trace.hexdigest()


class ProcessClock:
    """The clocks of one process: its own start, and a calendar that may jump."""

    def __init__(self, world: World, *, started: float = 0.0, wall_offset: float = 0.0) -> None:
        self._world = world
        self._started = started
        self.wall_offset = wall_offset

    def now(self) -> float:
        return self._world.now + self._started

    def wall(self) -> float:
        return WALL_START + self._world.now + self.wall_offset

    def sleep(self, seconds: float) -> None:
        """Never: what runs in the world is not allowed to wait."""
        raise AssertionError(f"a simulated process slept {seconds} s inside one event")

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,
        *,
        seconds: float | None = None,  # noqa: ARG002
    ) -> bool:
        """Never, for the same reason."""
        raise AssertionError(f"a simulated process waited for {holds} and {changed}")
