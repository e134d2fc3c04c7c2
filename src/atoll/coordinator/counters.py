"""How often things happened since this process started: what was refused, and a few other counts.

In memory only, and only to be shown: nothing is decided by it.
"""

import threading
from collections import Counter

from atoll.errors import AtollError, LeftOut, StaleContribution


class Counters:
    """Counters by name and refusals by code. Thread-safe."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.measured: dict[str, float] = {}  # the newest of each
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Counts something that happened."""
        with self._lock:
            self.counted[name] += amount

    def refused(self, error: AtollError) -> None:
        """Counts a message that was refused with `error`."""
        with self._lock:
            self.refusals[error.code] += 1
            if isinstance(error, StaleContribution) and not isinstance(error, LeftOut):
                self.counted["stale_contributions"] += 1
