"""When collectives that were begun are worked on."""

import queue
import threading
from collections import deque
from collections.abc import Callable

from atoll.collectives.base import Handle
from atoll.errors import GroupBroken


class _Done:
    """A handle that another thread completes."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        """How it ended; the first word stands."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class Threaded:
    """A thread of its own works while the caller computes; `close` ends it after what was begun."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], _Done] | None] = (
            queue.SimpleQueue()
        )
        self._open: list[_Done] = []  # begun and not over, oldest first
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> Handle:
        """To be done after what was begun before."""
        done = _Done()
        if self._is_closed:
            done.finish(GroupBroken("this rank has left its group; nothing more is begun"))
            return done
        self._open.append(done)
        self._queue.put((work, done))
        return done

    def give_up(self, error: Exception) -> None:
        """Whoever waits for what was begun raises `error`; the work itself goes on to its end."""
        for done in list(self._open):
            done.finish(error)

    def close(self) -> None:
        """Waits for what was begun; whoever wants it to end sooner aborts it first."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()

    def ends_within(self, seconds: float) -> bool:
        """`close`, for at most so long; whether all that was begun is over."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (found := self._queue.get()) is not None:
            work, done = found
            try:
                work()
            except Exception as error:
                done.finish(error)
            else:
                done.finish(None)
            self._open.remove(done)


class _Deferred:
    """A handle whose work is done when it is waited for."""

    def __init__(self, runner: "Inline") -> None:
        self._runner = runner
        self.is_over = False
        self.error: Exception | None = None

    def wait(self) -> None:
        self._runner.work_until(self)
        if self.error is not None:
            raise self.error


class Inline:
    """The caller works itself when it waits, on all that it began before, too; for fibers.

    Ranks that begin and wait in one order never wait for each other in a circle.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[Callable[[], None], _Deferred]] = deque()

    def begin(self, work: Callable[[], None]) -> Handle:
        """To be done when its handle, or a later one, is waited for."""
        handle = _Deferred(self)
        self._begun.append((work, handle))
        return handle

    def work_until(self, handle: _Deferred) -> None:
        """Works on what was begun, up to this one."""
        while not handle.is_over:
            work, first = self._begun.popleft()
            try:
                work()
            except Exception as error:
                first.error = error
            first.is_over = True

    def close(self) -> None:
        """What nobody waited for is never done."""
        self._begun.clear()
