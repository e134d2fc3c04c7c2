"""What an island tells about itself: shown to operators; a strategy may give rows by its speed."""

import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.clock import Clock
from atoll.protocol.messages import Telemetry
from atoll.protocol.samples import MAX_BATCH, Sample
from atoll.traffic import Traffic

QUEUED_SAMPLES = 10_000  # nearly three hours without a coordinator
SAMPLE_SECONDS = 1.0  # at most one sample in this time


class Meter:
    """Counts tokens, and how many there were in a second of the last round's training.

    What goes on between two rounds, waits above all, is in no rate; before the first round is
    over, the rate is of what there is of it. For the thread that trains; the one that beats reads
    `telemetry`, which is replaced whole.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = 0
        self._before = 0  # of them, trained before the round under way
        self._began = clock.now()
        self._rate = 0.0  # of the last round; 0 before the first is over
        self._last = Telemetry()

    def begin(self) -> None:
        """The training of a round starts."""
        self._began, self._before = self._clock.now(), self._tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is no training."""
        since = self._clock.now()
        try:
            yield
        finally:
            self._began += self._clock.now() - since

    def end(self) -> None:
        """The training of a round is over."""
        self._rate = self._running()
        self._last = self._last.model_copy(update={"tokens_per_second": self._rate})

    def step(self, round_number: int, steps: int, *, tokens: int, loss: float) -> None:
        """One inner step is done."""
        self._tokens += tokens
        self._last = Telemetry(
            round=round_number,
            step=steps,
            tokens=self._tokens,
            tokens_per_second=self._rate or self._running(),
            loss=loss if math.isfinite(loss) else None,
        )

    def telemetry(self, traffic: Traffic) -> Telemetry:
        """The newest figures."""
        moved = {"bytes_sent": traffic.sent, "bytes_received": traffic.received}
        return self._last.model_copy(update=moved)

    def _running(self) -> float:
        seconds = self._clock.now() - self._began
        return (self._tokens - self._before) / seconds if seconds > 0 else 0.0


class Samples:
    """What was measured and not delivered yet; the oldest go when the queue is full. Thread-safe.

    Samples stay queued while the coordinator is away, and are dropped once it has them.
    """

    def __init__(self, clock: Clock, *, limit: int = QUEUED_SAMPLES) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Sample] = deque(maxlen=limit)  # the history shows a gap of sequences
        self._sequence = 0
        self._newest = (-math.inf, Telemetry())  # so the first sample has rates of 0

    def add(self, told: Telemetry) -> None:
        """Queues what `told` says, unless a sample was taken a moment ago."""
        now = self._clock.now()
        with self._lock:
            then, before = self._newest
            seconds = now - then
            if seconds < SAMPLE_SECONDS:
                return
            self._newest = (now, told)
            self._sequence += 1
            sample = Sample(
                sequence=self._sequence,
                wall=self._clock.wall(),
                memory_bytes=memory_bytes(),
                sent_per_second=max(0, told.bytes_sent - before.bytes_sent) / seconds,
                received_per_second=max(0, told.bytes_received - before.bytes_received) / seconds,
                **told.model_dump(include={"round", "step", "loss", "tokens_per_second"}),
            )
            self._queue.append(sample)

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
