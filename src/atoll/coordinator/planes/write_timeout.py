"""HTTP connections whose other side must read what it asked for: uvicorn itself waits for ever.

Owns the limit of writing, by progress: a slow reader is waited for, one that does not read is not.
"""

import asyncio
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

WRITE_SECONDS = 10.0
PROGRESS_BYTES = 64 << 10  # or all there is
_AT_ONCE = struct.pack("ii", 1, 0)


class TimedWrites(H11Protocol):
    """Breaks a connection off that takes less than `PROGRESS_BYTES` in `write_seconds`.

    The time runs whenever something is left to be written that the kernel does not take.
    """

    write_seconds = WRITE_SECONDS
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override] # as in uvicorn: it is always a Transport
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        # Writing pauses as soon as anything is left, and goes on when nothing is. Not at 0: under
        # TLS a buffer that has reached the mark pauses, so an empty one would, for ever.
        transport.set_write_buffer_limits(high=1, low=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Looks after `write_seconds` how much has gone out."""
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self.write_seconds, self._look, left)

    def _look(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() >= PROGRESS_BYTES:
            self.watch()
        else:
            # A close would wait for the other side to read, here and then in the kernel.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()

    def _unwatch(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
