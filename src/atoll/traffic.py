"""Bytes that went one way and the other; shown, never used for anything."""

import threading
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What something has carried so far. `sends` and `receives` may be called by any thread."""

    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def sends(self, nbytes: int) -> None:
        """So many more bytes left."""
        with self._lock:
            self.sent += nbytes

    def receives(self, nbytes: int) -> None:
        """So many more bytes came."""
        with self._lock:
            self.received += nbytes
