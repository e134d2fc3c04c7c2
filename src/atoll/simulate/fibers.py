"""Cooperative threads on a virtual clock: one runs at a time, in an order that the program fixes.

Island code is ordinary blocking code. A fiber is a thread that holds the baton until it sleeps;
then the fiber with the earliest wake-up time gets it and the clock jumps there. Each fiber has its
own torch random state, put back whenever it gets the baton.
"""

import heapq
import itertools
import threading
from collections.abc import Callable

import torch

from atoll.errors import AtollError

WALL_START = 1_700_000_000.0  # a fixed calendar: records of a simulation do not depend on today


class Stopped(BaseException):
    """Unwinds a fiber that is ended from outside; not an Exception, so nothing swallows it."""


class Fiber:
    """One cooperative thread, which waits for the baton from its making on."""

    def __init__(self, scheduler: "Scheduler", name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.done = False
        self.stopping = False
        self.is_frozen = False  # it gets no turn
        self._scheduler = scheduler
        self._work = work
        self.pauses = 0  # how often it paused: a wake-up is for one pause only
        self._baton = threading.Semaphore(0)
        self._random = torch.get_rng_state()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def _main(self) -> None:
        self._take()
        try:
            if not self.stopping:
                self._work()
        except Stopped:
            pass
        except BaseException as exc:
            self.error = exc
        self.done = True
        self._scheduler.give_back()

    def resume(self) -> None:
        """Hands the baton over."""
        self._baton.release()

    def pause(self) -> None:
        """Called by the fiber itself: gives the baton back and waits for it."""
        self._random = torch.get_rng_state()
        self._scheduler.give_back()
        self._take()
        self.pauses += 1
        if self.stopping:
            raise Stopped

    def _take(self) -> None:
        self._baton.acquire()
        torch.set_rng_state(self._random)


class Scheduler:
    """The virtual clock and who runs next; fulfils `clock.Clock` for the fibers it runs."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Fiber, int]] = []  # with the pause that it ends
        self._waiting: list[tuple[Callable[[], object], Fiber, int]] = []
        self._main = threading.Semaphore(0)
        self._running: Fiber | None = None
        self._fibers: list[Fiber] = []
        self._missed: list[tuple[Fiber, int]] = []  # turns of frozen ones, with the pause

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return WALL_START + self._now

    def sleep(self, seconds: float) -> None:
        """Lets the others run until `seconds` of virtual time have passed."""
        fiber = self._running
        if fiber is None:
            self._now += seconds
            return
        self._push(self._now + max(0.0, seconds), fiber)
        fiber.pause()

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,  # noqa: ARG002
        *,
        seconds: float | None = None,
    ) -> bool:
        """Lets the others run until one of them has made `holds` true; fibers notify nobody."""
        fiber = self._running
        assert fiber is not None, "only a fiber waits for another"
        if holds():
            return True
        self._waiting.append((holds, fiber, fiber.pauses))
        if seconds is not None:
            self._push(self._now + seconds, fiber)
        fiber.pause()
        return bool(holds())

    def spawn(self, name: str, work: Callable[[], None]) -> Fiber:
        """A new fiber that starts at the present moment."""
        fiber = Fiber(self, name, work)
        self._fibers.append(fiber)
        self._push(self._now, fiber)
        return fiber

    def stop(self, fiber: Fiber) -> None:
        """Ends a fiber at its next turn, as a killed process ends."""
        fiber.stopping = True
        self.thaw(fiber)

    def freeze(self, fiber: Fiber) -> None:
        """The fiber gets no turn until `thaw`, while time goes on, as for a stopped process."""
        fiber.is_frozen = True

    def thaw(self, fiber: Fiber) -> None:
        """The fiber goes on; a turn that it missed comes now."""
        fiber.is_frozen = False
        for missed, pause in [m for m in self._missed if m[0] is fiber]:
            if missed.pauses == pause:
                self._push(self._now, missed)
        self._missed = [m for m in self._missed if m[0] is not fiber]

    def give_back(self) -> None:
        """The running fiber pauses or is done."""
        self._main.release()

    def run_until(self, finished: Callable[[], bool], *, limit_seconds: float) -> None:
        """Runs fibers until `finished`; an error in one, or no progress, ends the simulation."""
        try:
            while not finished():
                self._wake()
                if not self._queue:
                    raise AtollError("the simulation is stuck: no fiber has anything left to do")
                if self._now > limit_seconds:
                    raise AtollError(
                        f"the simulation did not finish in {limit_seconds:.0f} virtual seconds"
                    )
                self._turn()
        finally:
            self._unwind()

    def _wake(self) -> None:
        """Those whose wait is over go on at this moment."""
        still = []
        for holds, fiber, pause in self._waiting:
            if fiber.pauses != pause:
                continue  # its time was over first
            if holds() or fiber.stopping:
                self._push(self._now, fiber)
            else:
                still.append((holds, fiber, pause))
        self._waiting = still

    def _turn(self) -> None:
        when, _, fiber, pause = heapq.heappop(self._queue)
        if fiber.pauses != pause:
            return  # what it waited for came before
        self._now = max(self._now, when)
        if fiber.is_frozen and not fiber.stopping:
            self._missed.append((fiber, pause))
            return
        self._run(fiber)
        if fiber.error is not None:
            raise fiber.error

    def _unwind(self) -> None:
        for fiber in self._fibers:
            fiber.stopping = True
            self.thaw(fiber)
        self._wake()
        while self._queue:
            _, _, fiber, _ = heapq.heappop(self._queue)
            if not fiber.done:
                self._run(fiber)

    def _run(self, fiber: Fiber) -> None:
        """Until it pauses or is done."""
        self._running = fiber
        fiber.resume()
        self._main.acquire()
        self._running = None

    def _push(self, when: float, fiber: Fiber) -> None:
        heapq.heappush(self._queue, (when, next(self._order), fiber, fiber.pauses))
