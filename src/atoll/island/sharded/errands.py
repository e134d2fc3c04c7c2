"""Work beside the training, one piece after another, in a thread or a fiber of its own."""

import threading
from collections import deque
from collections.abc import Callable

from atoll.clock import Clock

Spawn = Callable[[str, Callable[[], None]], object]


class Errands:
    """Jobs that are done in the order they came; the first error ends it and is told to `failed`.

    Waits by its clock, so that fibers may use it.
    """

    def __init__(
        self, name: str, *, clock: Clock, spawn: Spawn, failed: Callable[[Exception], None]
    ) -> None:
        self._clock = clock
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = False
        self._is_closed = False
        spawn(name, self._work)

    def add(self, job: Callable[[], None]) -> None:
        """To be done after what came before; nothing once it is closed."""
        with self._changed:
            if not self._is_closed:
                self._jobs.append(job)
                self._changed.notify_all()

    @property
    def is_settled(self) -> bool:
        """Whether all that came is done or given up."""
        return not self._jobs and not self._busy

    def settle(self, *, seconds: float | None = None) -> bool:
        """Returns when all that came before is done or given up; False: not within `seconds`."""
        return self._clock.wait_for(lambda: self.is_settled, self._changed, seconds=seconds)

    def close(self) -> None:
        """What is not begun is given up; what is under way ends by itself."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            self._clock.wait_for(lambda: self._jobs or self._is_closed, self._changed)
            with self._changed:
                if not self._jobs:
                    return
                job, self._busy = self._jobs.popleft(), True
            try:
                job()
            except Exception as error:
                self.close()
                self._failed(error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
