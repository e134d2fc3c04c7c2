"""HTTP connections that must say what they want in time: uvicorn itself waits for ever.

Owns the limit for a request's head. An answer that takes long, as every long poll does, is not its
matter; nor is an idle connection, which uvicorn's keep-alive ends.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0


class TimedHeads(H11Protocol):
    """Closes a connection whose request head is not whole within `head_seconds`.

    The time runs from the connection's start, later from a head's first byte, and is not prolonged
    by more bytes of the same head.
    """

    head_seconds = HEAD_SECONDS
    _limit: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override] # as in uvicorn: it is always a Transport
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._keep_time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._keep_time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            # A part of the next head came during the answer: the connection is not idle.
            self._unset_keepalive_if_required()
        self._keep_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_time()
        super().connection_lost(exc)

    def _keep_time(self) -> None:
        """Runs the limit exactly while the client owes a head."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        # uvicorn's own timer runs after an answer and until the next byte.
        is_idle = self.timeout_keep_alive_task is not None
        if is_answering or is_idle or self.transport.is_closing():
            self._stop_time()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.head_seconds, self.timeout_keep_alive_handler)

    def _stop_time(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
