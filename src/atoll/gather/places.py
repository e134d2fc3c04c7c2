"""Who gets one of the few places to download next, so that a slow peer never holds another's.

Places are given by turns. Whoever is found slow stands behind all who are not and gets the places
that they leave free; whoever met trouble waits out its backoff without a place.
"""

import threading
from collections.abc import Callable
from statistics import median

from atoll.clock import Clock
from atoll.gather.errand import Errand

_SLOW = 4  # so many times slower than the median


class Places:
    """The queue of one fetch. Thread-safe; waits by its clock."""

    def __init__(self, errands: list[Errand], *, clock: Clock, deadline: float) -> None:
        self._queue = list(errands)
        self._clock = clock
        self._deadline = deadline
        self._changed = threading.Condition()
        self._busy = 0
        self._rates: dict[str, float] = {}  # by uid, bytes a second
        self.error: BaseException | None = None  # of ours: ends the fetch

    def take(self) -> Errand | None:
        """The next one whose turn it is; None once there will be none, or time is over."""
        while True:
            with self._changed:
                if self._is_over():
                    return None
                found = self._next()
                if found is not None:
                    self._queue.remove(found)
                    self._busy += 1
                    return found
                wakes = [errand.ready_at for errand in self._queue]
            until = min([self._deadline, *wakes])
            seconds = max(0.0, until - self._clock.now())
            self._clock.wait_for(self._can_go_on, self._changed, seconds=seconds)

    def settle(self) -> None:
        """One that was taken needs no more turns."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def put_back(self, errand: Errand) -> None:
        """One that was taken needs another turn, at `ready_at` or later."""
        with self._changed:
            self._busy -= 1
            self._queue.append(errand)
            self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Ends the fetch: nobody gets another turn."""
        with self._changed:
            self._busy -= 1
            self.error = self.error or error
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether somebody who is ready waits for a place."""
        with self._changed:
            return self._next() is not None

    def seen(self, errand: Errand, bytes_per_second: float) -> None:
        """How fast one was, of late."""
        with self._changed:
            self._rates[errand.peer.uid] = bytes_per_second
            errand.is_slow = errand.is_slow or self._is_slow(errand)

    def _is_slow(self, errand: Errand) -> bool:
        own = self._rates[errand.peer.uid]
        others = [rate for uid, rate in self._rates.items() if uid != errand.peer.uid]
        return bool(others) and own * _SLOW < median(others)

    def _next(self) -> Errand | None:
        now = self._clock.now()
        ready = [errand for errand in self._queue if errand.ready_at <= now]
        return min(ready, key=lambda errand: errand.is_slow, default=None)  # the first of equals

    def _is_over(self) -> bool:
        is_done = not self._queue and not self._busy
        return is_done or self.error is not None or self._clock.now() >= self._deadline

    def _can_go_on(self) -> bool:
        return self._is_over() or self._next() is not None


Run = Callable[[list[Callable[[], None]]], None]


def in_threads(works: list[Callable[[], None]]) -> None:
    """Does all of `works` at once and returns when all are done; a single one right here."""
    threads = [threading.Thread(target=work, name="fetch", daemon=True) for work in works[1:]]
    for thread in threads:
        thread.start()
    works[0]()
    for thread in threads:
        thread.join()
