"""The event loop of a fault simulation: one thread, a virtual clock, a hash of all that happened.

Nothing here reads a real clock or unseeded randomness, so a seed gives one history.
"""

import hashlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable

WALL_START = 1_700_000_000.0
LAST_LINES = 40


class EventLoop:
    """Events in the order of their time; equal times in the order of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.lines: deque[str] = deque(maxlen=LAST_LINES)  # the newest, for a report
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._trace = hashlib.sha256()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        """Does `work` so much later."""
        heapq.heappush(self._queue, (self.now + max(0.0, seconds), next(self._order), work))

    def note(self, kind: str, detail: str = "") -> None:
        """Adds a line to the history and counts its kind."""
        self.counts[kind] += 1
        line = f"{self.now:.6f} {kind} {detail}"
        self.lines.append(line)
        self._trace.update(line.encode() + b"\n")

    def turn(self) -> None:
        """Does the next event."""
        when, _, work = heapq.heappop(self._queue)
        self.now = when
        self.events += 1
        work()

    @property
    def trace(self) -> str:
        """The hash of the history so far."""
        return self._trace.hexdigest()


class LoopClock:
    """The clocks of one process: its own start, and a calendar that may jump."""

    def __init__(self, loop: EventLoop, *, started: float, wall_offset: float) -> None:
        self._loop = loop
        self._started = started
        self.wall_offset = wall_offset

    def now(self) -> float:
        return self._loop.now + self._started

    def wall(self) -> float:
        return WALL_START + self._loop.now + self.wall_offset

    def sleep(self, seconds: float) -> None:
        """Never: what runs in the loop is not allowed to wait."""
        raise AssertionError(f"a simulated process slept {seconds} s inside one event")
