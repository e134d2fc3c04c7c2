"""The bytes of one range as they come from an S3 server, counted and cut."""

from collections.abc import AsyncIterator

import httpx

from atoll.blobs import s3_answers
from atoll.blobs.bucket import PIECE_BYTES, Tag
from atoll.blobs.s3_calls import S3Calls
from atoll.errors import StoreError


class S3Stream:
    """One GET of a range of a pinned object.

    Holds one piece and what one read of the socket gave. What arrived before an error is handed
    out first, so that a caller can go on behind it.
    """

    def __init__(
        self, calls: S3Calls, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> None:
        self._calls = calls
        self._key, self._tag = key, tag
        self._start, self._stop = start, stop
        self._deadline = deadline
        self._left = stop - start  # to be received
        self._held = bytearray()  # received and not handed out
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._error: StoreError | None = None
        self._ended = False

    async def next_piece(self) -> bytes:
        """At most `PIECE_BYTES` of what follows; nothing once the range was handed out whole."""
        if self._chunks is None and self._error is None:
            await self._open()
        # One read behind the last byte: only then it is known that nothing follows.
        while len(self._held) < PIECE_BYTES and not self._ended and self._error is None:
            await self._receive()
        piece = bytes(self._held[:PIECE_BYTES])
        del self._held[: len(piece)]
        if not piece and self._error is not None:
            raise self._error
        return piece

    async def close(self) -> None:
        """Closes the connection unless all was read; harmless when repeated."""
        if self._response is not None:
            await self._response.aclose()

    async def _open(self) -> None:
        headers = {
            "range": f"bytes={self._start}-{self._stop - 1}",
            "if-match": self._tag.entity,
        }
        self._response = await self._calls.send(
            "GET", self._key, headers=headers, deadline=self._deadline
        )
        s3_answers.check_range(
            self._response, self._calls.where(self._key), self._tag, self._start, self._stop
        )
        self._chunks = self._response.aiter_raw()

    async def _receive(self) -> None:
        assert self._chunks is not None, "opened"
        where = self._calls.where(self._key)
        try:
            chunk = await self._calls.by(self._deadline, anext(self._chunks, b""), where)
        except StoreError as exc:
            self._error = exc
            return
        self._held += chunk[: self._left]
        if len(chunk) > self._left:
            self._error = s3_answers.size(where, self._start, self._stop, found="more")
        elif not chunk and self._left:
            given = f"{self._stop - self._start - self._left}"
            self._error = s3_answers.size(where, self._start, self._stop, found=given)
        self._ended = not chunk
        self._left -= min(len(chunk), self._left)
