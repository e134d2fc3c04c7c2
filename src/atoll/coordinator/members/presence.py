"""Presence streams: the end of one is how a killed process or a reset is noticed at once.

In memory only. A stream that ended may come back within the grace period; who never opened one is
judged by heartbeats alone.
"""

import threading
from collections.abc import Callable
from typing import Literal

from atoll.clock import Clock

GRACE_SECONDS = 1.0  # a reset connection is dialled again well within it

State = Literal["open", "lost", "none"]


class Stream:
    """One presence stream of one life of a worker; changed under the lock of `Presence`."""

    def __init__(self, worker_id: str, incarnation: int, close: Callable[[], None]) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.close = close  # ends it from the coordinator's side, from any thread
        self.lost_at: float | None = None


class Presence:
    """The newest stream of each worker. Thread-safe."""

    def __init__(self, clock: Clock, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._stopped = False

    def open(self, worker_id: str, incarnation: int, close: Callable[[], None]) -> Stream:
        """A stream that counts from now on; an earlier one of the worker is ended."""
        stream = Stream(worker_id, incarnation, close)
        with self._lock:
            earlier = self._streams.get(worker_id)
            newer_is_here = earlier is not None and earlier.incarnation > incarnation
            unwanted = stream if self._stopped or newer_is_here else earlier
            if unwanted is not stream:
                self._streams[worker_id] = stream
        if unwanted is not None:
            unwanted.close()
        return stream

    def lose(self, stream: Stream) -> bool:
        """The stream ended; whether it was the worker's newest, so that the grace period runs."""
        with self._lock:
            newest = self._streams.get(stream.worker_id) is stream
            if not newest or stream.lost_at is not None or self._stopped:
                return False
            stream.lost_at = self._clock.now()
            return True

    def forget(self, worker_id: str, incarnation: int) -> None:
        """Ends the worker's stream if it belongs to that life or an earlier one."""
        with self._lock:
            stream = self._streams.get(worker_id)
            if stream is None or stream.incarnation > incarnation:
                return
            del self._streams[worker_id]
        stream.close()

    def overdue(self) -> list[tuple[Stream, float]]:
        """Streams that did not come back within the grace period, with the seconds since."""
        now = self._clock.now()
        with self._lock:
            lost = [(s, now - s.lost_at) for s in self._streams.values() if s.lost_at is not None]
        return [(stream, seconds) for stream, seconds in lost if seconds > self._grace_seconds]

    def state(self, worker_id: str) -> State:
        """What is known of the worker's stream."""
        with self._lock:
            stream = self._streams.get(worker_id)
        if stream is None:
            return "none"
        return "open" if stream.lost_at is None else "lost"

    def stop(self) -> None:
        """Ends all streams because the coordinator stops; no worker counts as lost by that."""
        with self._lock:
            self._stopped = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
