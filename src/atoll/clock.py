"""Time as an argument: the one seam between Atoll and the machine's clocks."""

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What a service may know about time.

    `now` never goes back and is only good for differences; `wall` is for people and records.
    """

    def now(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,
        *,
        seconds: float | None = None,
    ) -> bool:
        """Whether another thread has made `holds` true and notified `changed` of it.

        False only when `seconds` are given and over.
        """


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,
        *,
        seconds: float | None = None,
    ) -> bool:
        with changed:
            return bool(changed.wait_for(holds, seconds))


class ManualClock:
    """A clock that moves only when told to; for tests and single-threaded simulation."""

    def __init__(self, start: float = 0.0, *, wall_start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall_start - start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def sleep(self, seconds: float) -> None:
        self.advance(seconds=seconds)

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,
        *,
        seconds: float | None = None,
    ) -> bool:
        """Waits for a real thread, so many real seconds; no time of this clock passes."""
        with changed:
            return bool(changed.wait_for(holds, seconds))

    def advance(self, *, seconds: float) -> None:
        self._now += seconds
