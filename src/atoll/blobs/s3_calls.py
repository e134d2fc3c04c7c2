"""One S3 bucket's requests over HTTP, for reading what nobody vouches for.

Every call ends at its deadline and closes its connection then. A redirect is refused: it would
carry the signature, and a session token, to an address that the run never named. obstore, which
serves the blob store, follows redirects and returns however many bytes a server sends, and offers
no setting against either; hence a client of our own, of the few calls that a bucket needs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar

import httpx

from atoll.blobs import bucket as buckets
from atoll.blobs import s3_signing
from atoll.blobs.access import S3Access
from atoll.clock import Clock
from atoll.errors import ObjectRefused, ObjectSize, StoreAway

Value = TypeVar("Value")

_ANSWERS = (200, 204, 206, 404, 412, 416)  # what a caller makes something of
# Busy, or two writers at once: the same request may pass later. Others of 500 and above as well.
_LATER = (408, 409, 425, 429)
_NEVER = (501, 505)


class S3Calls:
    """The requests of one bucket, made on one event loop."""

    def __init__(self, name: str, access: S3Access, clock: Clock) -> None:
        self._name = name
        self._access = access
        self._clock = clock
        # No timeouts of its own: those are per read, and a server that trickles keeps each.
        # No environment: a proxy or .netrc of the user would see what is meant for the server.
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None)

    async def close(self) -> None:
        await self._client.aclose()

    def where(self, key: str) -> str:
        """How messages name an object."""
        return f"object s3://{self._name}/{key}"

    async def send(
        self,
        method: str,
        key: str = "",
        *,
        deadline: float,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] = b"",
        content_sha256: str = s3_signing.EMPTY_SHA256,
    ) -> httpx.Response:
        """The answer, its body not yet read; close it. Trouble and refusals are raised."""
        path = f"{self._access.url}/{self._name}" + (f"/{key}" if key else "")
        url = f"{path}?{s3_signing.query_text(query)}" if query else path
        signature = s3_signing.headers(
            method, url, access=self._access, body_sha256=content_sha256, wall=self._clock.wall()
        )
        request = self._client.build_request(
            method,
            url,
            headers={**(headers or {}), **signature, "accept-encoding": "identity"},
            content=content,
        )
        where = self.where(key)
        sending = self._client.send(request, stream=True)
        response = await self.by(deadline, sending, f"{method} {where}")
        if response.status_code not in _ANSWERS:
            await response.aclose()
            raise _refusal(response, f"{method} {where}")
        return response

    async def body(
        self, response: httpx.Response, key: str, *, limit: int, deadline: float
    ) -> bytes:
        """All of a small body; ObjectSize when it is larger than `limit`."""
        whole = bytearray()
        try:
            chunks = response.aiter_raw()
            while chunk := await self.by(deadline, anext(chunks, b""), self.where(key)):
                whole += chunk
                if len(whole) > limit:
                    raise ObjectSize(
                        f"{self.where(key)} was answered with more than {limit} bytes, which no "
                        f"sound server needs here; check the endpoint"
                    )
        finally:
            await response.aclose()
        return bytes(whole)

    async def by(self, deadline: float, work: Awaitable[Value], where: str) -> Value:
        """What `work` gives; StoreLate, and it is cancelled, at the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                return await work
        except TimeoutError as exc:
            raise buckets.late(where) from exc
        except httpx.TransportError as exc:
            reason = str(exc) or type(exc).__name__
            raise StoreAway(f"{where} was not answered: {reason[:200]}") from exc


def _refusal(response: httpx.Response, what: str) -> ObjectRefused | StoreAway:
    status = response.status_code
    if status in _LATER or (status >= 500 and status not in _NEVER):
        return StoreAway(f"{what} was answered with status {status}; the server may take it later")
    if 300 <= status < 400:
        target = response.headers.get("location", "")[:200]
        return ObjectRefused(
            f"{what} was redirected (status {status}) to {target!r}, which is refused: addresses "
            f"come from the run alone; name the right endpoint there"
        )
    return ObjectRefused(
        f"{what} was refused with status {status}; check the bucket, the credentials and what they "
        f"may do"
    )
