"""What an island tells about itself: shown to operators, never used for the model."""

import math

from atoll.clock import Clock
from atoll.protocol.messages import Telemetry


class Meter:
    """Counts tokens and the seconds spent training on them, waits left out."""

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
