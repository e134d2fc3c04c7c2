"""Who has been heard from, in memory only: a heartbeat never costs a transaction."""

import threading
from collections.abc import Iterable

from atoll.clock import Clock
from atoll.protocol.messages import Telemetry


class Heartbeats:
    """When each worker was last heard, and what it last told. Thread-safe."""

    def __init__(self, clock: Clock, *, timeout_seconds: float) -> None:
        self._clock = clock
        self.timeout_seconds = timeout_seconds  # moves with the manifest in force
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._telemetry: dict[str, Telemetry] = {}

    def hear(self, worker_id: str, telemetry: Telemetry | None = None) -> None:
        """Any message of a worker is a sign of life; progress of a transfer too."""
        with self._lock:
            self._heard[worker_id] = self._clock.now()
            if telemetry is not None:
                self._telemetry[worker_id] = telemetry

    def forget(self, worker_id: str) -> None:
        """A worker that left is not live, at once."""
        with self._lock:
            self._heard.pop(worker_id, None)

    def live(self, candidates: Iterable[str]) -> frozenset[str]:
        """Those of `candidates` heard from within the timeout."""
        now = self._clock.now()
        with self._lock:
            return frozenset(
                worker
                for worker in candidates
                if now - self._heard.get(worker, float("-inf")) <= self.timeout_seconds
            )

    def seconds_since(self, worker_id: str) -> float | None:
        """Seconds since `worker_id` was heard; None when never in this life of the coordinator."""
        with self._lock:
            heard = self._heard.get(worker_id)
        return None if heard is None else self._clock.now() - heard

    def speeds(self) -> dict[str, float]:
        """Tokens per second that workers tell of themselves, where they do."""
        with self._lock:
            told = self._telemetry.items()
            return {name: t.tokens_per_second for name, t in told if t.tokens_per_second > 0}

    def telemetry(self, worker_id: str) -> Telemetry:
        """What `worker_id` last reported."""
        with self._lock:
            return self._telemetry.get(worker_id, Telemetry())
