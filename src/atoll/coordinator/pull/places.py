"""Who may pull now: a few places, which a slow object does not keep, and which servers answer.

In memory only: after a restart everybody announces again.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

from atoll.clock import Clock
from atoll.strategies.base import Lease

SLOTS = 8  # quick pulls at a time
WIDTH = 4  # and so many times as many in all: each has a thread
QUICK_SECONDS = 2.0  # a pull that takes longer leaves its place to the next and goes on beside it
FIRST_WAIT_SECONDS = 0.5  # before a server that failed is asked again; each twice the one before
LONGEST_WAIT_SECONDS = 8.0


class Places:
    """The pulls under way. Thread-safe."""

    def __init__(self, clock: Clock, *, slots: int = SLOTS) -> None:
        self._clock = clock
        self._slots = slots
        self._lock = threading.Lock()
        self._since: dict[Lease, float] = {}
        self._is_wanted = False  # whether somebody was sent away since the last look

    def take(self, lease: Lease, *, room: Callable[[], int]) -> str:
        """Why this lease's object is not pulled now; "" when it is, until `leave`.

        At most `room` of its round are pulled at a time. It is asked while nobody leaves: whatever
        a pull that is over has come to, it knows.
        """
        with self._lock:
            if lease in self._since:
                return "the pull that is under way"
            if sum(number == lease[0] for number, _ in self._since) >= room():
                return f"pulls of round {lease[0]} that are under way"
            now = self._clock.now()
            quick = sum(now - since < QUICK_SECONDS for since in self._since.values())
            if quick >= self._slots or len(self._since) >= self._slots * WIDTH:
                self._is_wanted = True
                return f"one of {self._slots} places to pull with"
            self._since[lease] = now
            return ""

    def leave(self, lease: Lease) -> None:
        """The pull is over, whatever came of it."""
        with self._lock:
            del self._since[lease]

    def call_again(self) -> bool:
        """Whether those that were sent away should ask again, since a place may be free."""
        with self._lock:
            now, wanted = self._clock.now(), self._is_wanted
            quick = sum(now - since < QUICK_SECONDS for since in self._since.values())
            if wanted and quick < self._slots and len(self._since) < self._slots * WIDTH:
                self._is_wanted = False
                return True
            return False


class Servers:
    """When the server of each bucket answered whom, and when it may be asked again. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._waits: dict[Lease, tuple[float, float]] = {}  # until when, and how long the next is

    def answered(self, bucket: str, lease: Lease) -> None:
        """It gave this worker's object, or said that there is none."""
        with self._lock:
            self._answers[bucket][lease[1]] = self._clock.now()
            self._waits.pop(lease, None)

    def failed(self, lease: Lease) -> None:
        """It did not answer, or refused."""
        with self._lock:
            _, seconds = self._waits.get(lease, (0.0, FIRST_WAIT_SECONDS))
            longer = min(LONGEST_WAIT_SECONDS, 2 * seconds)
            self._waits[lease] = (self._clock.now() + seconds, longer)

    def is_waited_for(self, lease: Lease) -> bool:
        """Whether it is too early to ask again."""
        with self._lock:
            return self._clock.now() < self._waits.get(lease, (0.0, 0.0))[0]

    def answered_others(self, bucket: str, worker_id: str, *, since: float) -> bool:
        """Whether it served another worker since then: what it denies one is then that one's."""
        with self._lock:
            answers = self._answers[bucket].items()
            return any(name != worker_id and at > since for name, at in answers)

    def forget(self, rounds: set[int]) -> None:
        """Rounds other than these are closed."""
        with self._lock:
            self._waits = {x: wait for x, wait in self._waits.items() if x[0] in rounds}

    def call_again(self) -> bool:
        """Whether somebody's wait is over; says so once."""
        with self._lock:
            now = self._clock.now()
            over = {lease for lease, (until, _) in self._waits.items() if 0 < until <= now}
            for lease in over:
                self._waits[lease] = (0.0, self._waits[lease][1])
            return bool(over)
