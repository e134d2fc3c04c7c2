"""Who gets one of the few places to download next, so that a slow peer never holds another's.

There are as many places as the budget has slots. Nobody gets one before a first, small piece has
come: until then a peer is on trial, beside the places and together with many others. A peer holds a
place while it is quick: once a piece of it takes longer than the grace and twice what is expected,
or it is found slow, it goes on beside the places, and the next one begins. Beside them is room for
twice as many, of which those that were found slow before get half. Whoever met trouble waits out
its backoff without either.
"""

import threading
from collections.abc import Callable
from statistics import median

from atoll.clock import Clock
from atoll.gather.errand import Errand

WIDTH = 3  # threads for each slot: one in its place, two beside
TRIALS = 16  # first pieces at a time, whatever the slots; who takes longer lets others begin
MOST_TRIALS = 24  # with those that take longer
FIRST_PIECE_BYTES = 16 << 10
_LATE = 2
_SLOW = 4  # so many times slower than the median


class Places:
    """The queue of one fetch. Thread-safe; waits by its clock."""

    def __init__(
        self,
        errands: list[Errand],
        *,
        slots: int,
        grace_seconds: float,
        clock: Clock,
        deadline: float,
    ) -> None:
        self._queue = list(errands)
        self._slots = slots
        self._grace = grace_seconds
        self._clock = clock
        self._deadline = deadline
        self._changed = threading.Condition()
        self._busy: list[Errand] = []
        self._first: dict[str, float] = {}  # by uid, bytes a second of a first piece
        self._quick: dict[str, float] = {}  # by uid, bytes a second of those after it
        self._taken: dict[str, float] = {}  # by uid, seconds of its last piece
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
                    self._busy.append(found)
                    found.moved_at = self._clock.now()
                    found.is_on_trial = not found.is_known
                    return found
                now = self._clock.now()
                wakes = [one.ready_at for one in self._queue if one.ready_at > now]
                wakes += [self._holds_until(one) for one in self._busy if self._holds(one)]
            seconds = max(0.0, min([self._deadline, *wakes]) - now)
            self._clock.wait_for(self._can_go_on, self._changed, seconds=seconds)

    def settle(self, errand: Errand) -> None:
        """One that was taken needs no more turns."""
        with self._changed:
            self._busy.remove(errand)
            self._changed.notify_all()

    def put_back(self, errand: Errand) -> None:
        """One that was taken needs another turn, at `ready_at` or later."""
        with self._changed:
            self._busy.remove(errand)
            self._queue.append(errand)
            self._changed.notify_all()

    def give_up(self, errand: Errand, error: BaseException) -> None:
        """Ends the fetch: nobody gets another turn."""
        with self._changed:
            self._busy.remove(errand)
            self.error = self.error or error
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether somebody who is ready waits."""
        with self._changed:
            now = self._clock.now()
            return any(errand.ready_at <= now for errand in self._queue)

    def may_go_on(self, errand: Errand) -> bool:
        """Whether one that was taken keeps its thread: after its trial it needs a place."""
        with self._changed:
            if errand.is_on_trial and errand.is_known:
                if not self._has_room(errand):
                    return False
                errand.is_on_trial = False
            return True

    def seen(self, errand: Errand, nbytes: int, seconds: float, *, is_cut: bool) -> None:
        """What came of one's last piece, and how long it took."""
        rate = nbytes / max(seconds, 1e-6)
        with self._changed:
            uid = errand.peer.uid
            # Like with like: a first piece is small, and mostly the server's answering time.
            known = self._first if errand.is_on_trial else self._quick
            # Those that were found slow are no measure: there may be many of them, and before
            # anybody else.
            others = [one for other, one in known.items() if other != uid]
            if is_cut:
                errand.is_slow = True
            elif others:
                errand.is_slow = rate * _SLOW < median(others)
            if errand.is_slow:
                known.pop(uid, None)
            else:
                known[uid] = rate
                self._taken[uid] = seconds
            errand.is_known = True
            errand.moved_at = self._clock.now()
            self._changed.notify_all()

    def _holds(self, errand: Errand) -> bool:
        return not errand.is_slow and self._clock.now() < self._holds_until(errand)

    def _holds_until(self, errand: Errand) -> float:
        """What its next piece should take at its own speed; what others' took while that is new."""
        if errand.peer.uid in self._quick:
            expected = errand.piece_bytes / self._quick[errand.peer.uid]
        else:
            expected = median(self._taken.values()) if self._taken else 0.0
        return errand.moved_at + max(self._grace, _LATE * expected)

    def expected_seconds(self, errand: Errand) -> float:
        """What the next piece of a quick peer should take; 0 while it is not known to be one."""
        with self._changed:
            rate = self._quick.get(errand.peer.uid)
            return 0.0 if rate is None or errand.is_slow else errand.piece_bytes / rate

    def _next(self) -> Errand | None:
        now = self._clock.now()
        for errand in self._queue:
            if errand.ready_at <= now and self._has_room(errand):
                return errand
        return None

    def _has_room(self, errand: Errand) -> bool:
        """On trial with others, beside the places where it is slow, else in a place."""
        working = [one for one in self._busy if not one.is_on_trial]
        if not errand.is_known:
            trials = [one for one in self._busy if one.is_on_trial]
            return sum(map(self._holds, trials)) < TRIALS and len(trials) < MOST_TRIALS
        holding = sum(map(self._holds, working))
        room = len(working) - holding if errand.is_slow else holding
        return room < self._slots and len(working) < WIDTH * self._slots

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
