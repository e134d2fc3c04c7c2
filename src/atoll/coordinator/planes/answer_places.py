"""Large answers: how many are made and sent at once, and for whom.

An answer is in memory from before it is made until the last byte of it is the kernel's. Who does
not read keeps the place no longer than the limit of writing (`write_timeout`) lets him.
"""

import asyncio
import weakref
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.errors import NotReady

PLACES = 4  # for workers, and as many for admins
WAIT_SECONDS = 10.0
PIECE_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class AnswerPlaces:
    """Places for large answers; belongs to the event loop.

    Workers have `PLACES` in all and one each, so that no one of them takes those of the others;
    admins have as many that no worker can use up.
    """

    _: KW_ONLY
    wait_seconds: float = WAIT_SECONDS
    _workers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES))
    _admins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES))
    _own: weakref.WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=weakref.WeakValueDictionary
    )

    async def hold(self, asker: str | None) -> AsyncExitStack:
        """A place for `asker`, None for an admin; NotReady when none is free in time."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self.wait_seconds):
                    if asker is not None:
                        # Before the common places: who waits for his own takes none of them.
                        own = self._own.setdefault(asker, asyncio.Lock())
                        await held.enter_async_context(own)
                    await held.enter_async_context(self._admins if asker is None else self._workers)
            except TimeoutError as exc:
                raise NotReady(
                    f"{asker or 'the admin role'} waited {self.wait_seconds:g} s for a place: large"
                    f" answers go out one at a time to each worker or address and {PLACES} in all; "
                    f"read the earlier ones to their end, then ask again"
                ) from exc
            return held.pop_all()


def sent_in_pieces(content: str | bytes, *, media_type: str, held: AsyncExitStack) -> Response:
    """An answer that closes `held` when nothing of it is left to be sent."""
    return _Pieces(content, media_type=media_type, held=held)


class _Pieces(Response):
    """Goes out piece by piece, the next when the one before is gone; then gives its place back."""

    def __init__(self, content: str | bytes, *, media_type: str, held: AsyncExitStack) -> None:
        super().__init__(content, media_type=media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with self._held:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            for start in range(0, len(self.body), PIECE_BYTES):
                piece = self.body[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            # Empty, and so it is sent when nothing is left to be written.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
