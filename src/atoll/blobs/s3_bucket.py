"""A bucket of an S3 server, whose answers are counted, pinned and cut off in time.

Blocking calls on top of an event loop of its own, because only there a request can be cancelled.
The credentials must be allowed to list the bucket: without that right S3 answers 403, and not 404,
where an object is missing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx

from atoll.blobs import bucket as buckets
from atoll.blobs import s3_answers
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Tag
from atoll.blobs.loop_thread import LoopThread
from atoll.blobs.s3_answers import Page
from atoll.blobs.s3_body import Body
from atoll.blobs.s3_calls import S3Calls
from atoll.blobs.s3_stream import S3Stream
from atoll.clock import Clock

SLOWEST_BYTES_PER_SECOND = 128 << 10  # an uplink of 1 Mbit/s; a write gets that much time
MAX_ANSWER_BYTES = 64 << 10
MAX_LISTING_BYTES = 4 << 20  # a page of 1,000 keys of at most 1 KiB, with what stands around them


class S3Bucket:
    """The bucket `name` at the server of `access`; several threads may share it. Close it.

    What has no deadline of its own (writes, listings) ends after the timeout in `access`; a write
    gets as much more as its bytes need.
    """

    def __init__(self, name: str, access: S3Access, clock: Clock) -> None:
        self._clock = clock
        self._timeout = access.timeout_seconds
        self._calls = S3Calls(name, access, clock)
        self._thread = LoopThread(f"bucket {name}")

    def close(self) -> None:
        """Closes the connections; harmless when repeated."""
        if not self._thread.is_closed:
            self._thread.run(self._calls.close())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def look(self, key: str, *, deadline: float) -> Tag | None:
        buckets.check_key(key)
        return self._thread.run(self._look(key, deadline))

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        buckets.check_key(key)
        buckets.check_range(key, tag, start, stop)
        if start == stop:
            return
        stream = S3Stream(self._calls, key, tag, start, stop, deadline=deadline)
        try:
            while piece := self._thread.run(stream.next_piece()):
                yield memoryview(piece)
        finally:
            self._thread.run(stream.close())

    def put(self, key: str, source: bytes | Path) -> Tag:
        buckets.check_key(key)
        return self._thread.run(self._put(key, Body.of(source)))

    def create(self, key: str, data: bytes) -> bool:
        buckets.check_key(key)
        return self._thread.run(self._create(key, Body.of(data)))

    def remove(self, key: str) -> None:
        buckets.check_key(key)
        self._thread.run(self._remove(key))

    def keys(self, prefix: str) -> Iterator[str]:
        buckets.check_key(prefix)
        token: str | None = None
        deadline = self._deadline()
        while True:
            page = self._thread.run(self._page(prefix + "/", token, deadline))
            yield from page.keys
            if page.next is None:
                return
            token = page.next

    async def _look(self, key: str, deadline: float) -> Tag | None:
        response = await self._calls.send("HEAD", key, deadline=deadline)
        # Read though it is empty: the connection is used again.
        await self._calls.body(response, key, limit=0, deadline=deadline)
        return s3_answers.tag(response, self._calls.where(key))

    async def _put(self, key: str, body: Body) -> Tag:
        response = await self._write(key, body, {})
        s3_answers.check_written(response, self._calls.where(key))
        tag = await self._confirmed(key, body)
        if response.headers.get("etag", tag.entity) != tag.entity:
            raise buckets.changed(self._calls.where(key))
        return tag

    async def _create(self, key: str, body: Body) -> bool:
        response = await self._write(key, body, {"if-none-match": "*"})
        if response.status_code == 412:
            return False
        s3_answers.check_written(response, self._calls.where(key))
        await self._confirmed(key, body)
        return True

    async def _write(self, key: str, body: Body, headers: dict[str, str]) -> httpx.Response:
        deadline = self._deadline() + body.nbytes / SLOWEST_BYTES_PER_SECOND
        length = {"content-length": str(body.nbytes)}
        with body.opened() as content:
            response = await self._calls.send(
                "PUT",
                key,
                deadline=deadline,
                headers={**headers, **length},
                content=content,
                content_sha256=body.sha256,
            )
        await self._calls.body(response, key, limit=MAX_ANSWER_BYTES, deadline=deadline)
        return response

    async def _confirmed(self, key: str, body: Body) -> Tag:
        tag = await self._look(key, self._deadline())
        return buckets.confirmed(self._calls.where(key), tag, nbytes=body.nbytes)

    async def _remove(self, key: str) -> None:
        deadline = self._deadline()
        response = await self._calls.send("DELETE", key, deadline=deadline)
        await self._calls.body(response, key, limit=MAX_ANSWER_BYTES, deadline=deadline)

    async def _page(self, folder: str, token: str | None, deadline: float) -> Page:
        query = {"list-type": "2", "prefix": folder, "max-keys": "1000"}
        if token is not None:
            query["continuation-token"] = token
        response = await self._calls.send("GET", query=query, deadline=deadline)
        data = await self._calls.body(response, folder, limit=MAX_LISTING_BYTES, deadline=deadline)
        return s3_answers.page(response, data, folder, self._calls.where(folder))

    def _deadline(self) -> float:
        return self._clock.now() + self._timeout
