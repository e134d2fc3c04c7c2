"""What an island tells about itself: shown to operators, never used for the model."""

import math
import os
import threading
from collections import deque
from pathlib import Path

from atoll.clock import Clock
from atoll.protocol.messages import Telemetry
from atoll.protocol.samples import MAX_BATCH, Sample

QUEUED_SAMPLES = 10_000  # nearly three hours without a coordinator
SAMPLE_SECONDS = 1.0  # at most one sample in this time


class Meter:
    """Counts tokens and the seconds spent training on them, waits left out.

    For the thread that trains; the one that beats reads `telemetry`, which is replaced whole.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._tokens = 0
        self._began: float | None = None
        self._last = Telemetry()

    def begin(self) -> None:
        """Training starts."""
        self._began = self._clock.now()

    def end(self) -> None:
        """Training pauses; a sync follows."""
        self._seconds += self._running()
        self._began = None

    def step(self, round_number: int, steps: int, *, tokens: int, loss: float) -> None:
        """One inner step is done."""
        self._tokens += tokens
        seconds = self._seconds + self._running()
        self._last = Telemetry(
            round=round_number,
            step=steps,
            tokens=self._tokens,
            tokens_per_second=self._tokens / seconds if seconds > 0 else 0.0,
            loss=loss if math.isfinite(loss) else None,
        )

    def telemetry(self, *, bytes_sent: int, bytes_received: int) -> Telemetry:
        """The newest figures."""
        return self._last.model_copy(
            update={"bytes_sent": bytes_sent, "bytes_received": bytes_received}
        )

    def _running(self) -> float:
        return 0.0 if self._began is None else self._clock.now() - self._began


class Samples:
    """What was measured and not delivered yet; the oldest go when the queue is full. Thread-safe.

    Samples stay queued while the coordinator is away, and are dropped once it has them.
    """

    def __init__(self, clock: Clock, *, limit: int = QUEUED_SAMPLES) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Sample] = deque()
        self._limit = limit
        self._sequence = 0
        self._newest: tuple[float, Telemetry] | None = None

    def add(self, told: Telemetry) -> None:
        """Queues what `told` says, unless a sample was taken a moment ago."""
        now = self._clock.now()
        with self._lock:
            before = self._newest
            if before is not None and now - before[0] < SAMPLE_SECONDS:
                return
            seconds = 0.0 if before is None else now - before[0]
            self._newest = (now, told)
            self._sequence += 1
            self._queue.append(
                Sample(
                    sequence=self._sequence,
                    wall=self._clock.wall(),
                    round=told.round,
                    step=told.step,
                    loss=told.loss,
                    tokens_per_second=told.tokens_per_second,
                    memory_bytes=memory_bytes(),
                    sent_per_second=_rate(before, told, "bytes_sent", seconds),
                    received_per_second=_rate(before, told, "bytes_received", seconds),
                )
            )
            if len(self._queue) > self._limit:
                self._queue.popleft()  # the history shows a gap of sequences

    def batch(self) -> tuple[Sample, ...]:
        """The oldest samples that are queued, at most a batch of them."""
        with self._lock:
            return tuple(self._queue[i] for i in range(min(len(self._queue), MAX_BATCH)))

    def delivered(self, sequence: int) -> None:
        """The coordinator has everything up to `sequence`."""
        with self._lock:
            while self._queue and self._queue[0].sequence <= sequence:
                self._queue.popleft()


def memory_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _rate(
    before: tuple[float, Telemetry] | None, told: Telemetry, name: str, seconds: float
) -> float:
    if before is None or seconds <= 0:
        return 0.0
    moved: int = getattr(told, name) - getattr(before[1], name)
    return max(0, moved) / seconds
