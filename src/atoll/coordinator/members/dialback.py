"""Whether a worker can be reached where it says it can: only where ranks dial each other.

Islands of the other strategies only dial out, and nothing here is called for them.
"""

import socket
from collections.abc import Callable

from atoll.clock import Clock
from atoll.errors import AddressUnreachable

DIAL_SECONDS = 3.0
PINGS = 3

Dial = Callable[[str, int, float], None]  # address, port, deadline in seconds; OSError when not


def connect(ip_address: str, port: int, seconds: float) -> None:
    """Opens a TCP connection and closes it."""
    socket.create_connection((ip_address, port), timeout=seconds).close()


class Dialback:
    """Dials workers as they join and remembers how long it took. Thread-safe."""

    def __init__(self, clock: Clock, *, dial: Dial = connect) -> None:
        self._clock = clock
        self._dial = dial
        self._pings: dict[str, float] = {}  # written item by item, read as a copy: no lock

    def check(self, worker_id: str, ip_address: str, port: int) -> None:
        """Dials a few times, within a deadline each; AddressUnreachable names what was tried.

        Blocks, so it belongs on a thread.
        """
        if not port:
            raise AddressUnreachable(
                f"worker_id={worker_id!r} advertises no port; ranks of this run dial each other, "
                f"so it must listen on one and register with it"
            )
        try:
            fastest = min(self._ping(ip_address, port) for _ in range(PINGS))
        except OSError as exc:
            raise AddressUnreachable(
                f"worker_id={worker_id!r} is not reached at {ip_address}:{port} within "
                f"{DIAL_SECONDS:.0f} s ({exc}); ranks of this run dial each other, so advertise an "
                f"address that the coordinator can connect to"
            ) from exc
        self._pings[worker_id] = fastest

    def _ping(self, ip_address: str, port: int) -> float:
        began = self._clock.now()
        self._dial(ip_address, port, DIAL_SECONDS)
        return 1000 * (self._clock.now() - began)

    def pings_ms(self) -> dict[str, float]:
        """The fastest of each worker's last pings, in milliseconds."""
        return dict(self._pings)
