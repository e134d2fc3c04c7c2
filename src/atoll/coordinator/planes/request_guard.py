"""What every HTTP request meets first: who may speak, how much, and what an accident looks like.

Runs before routing and before any byte of a body is read, so a route is closed unless its message
may be sent by anyone. Which role it needs beyond a known token is the route's own matter.
"""

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access
from atoll.errors import Accident, AtollError, FrameTooLarge, StaleGeneration
from atoll.protocol.messages import ErrorReply
from atoll.wire import statuses

log = logging.getLogger(__name__)

_SHORT_NUMBER = re.compile("[0-9]{1,10}")  # longer ones need not be read to be too large


@dataclass(frozen=True)
class RequestGuard:
    """Refuses strangers and unbounded bodies; answers for exceptions that nobody expected.

    Runs on the event loop.
    """

    app: ASGIApp
    _: KW_ONLY
    access: Access
    count: Callable[[AtollError], None]
    open_paths: Collection[str]
    max_body_bytes: int  # of any route; each has its own limit beside it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in self.open_paths:
                self.access.require(access.only(headers.getlist("authorization")))
            self._check_size(scope, headers)
        except AtollError as error:
            self.count(error)
            # Kept open, the connection would have to read the rest of the body to throw it away.
            await reply(error, close=True)(scope, receive, send)
            return
        await self._guarded(scope, receive, send)

    def _check_size(self, scope: Scope, headers: Headers) -> None:
        declared = headers.get("content-length", "0")
        fits = _SHORT_NUMBER.fullmatch(declared) and int(declared) <= self.max_body_bytes
        if not fits or "transfer-encoding" in headers:
            raise FrameTooLarge(
                f"{scope['method']} {scope['path'][:200]} with Content-Length={declared[:32]!r} and"
                f" Transfer-Encoding={headers.get('transfer-encoding', '')[:32]!r}: a body says its"
                f" size, which is at most {self.max_body_bytes} bytes on any route, and comes "
                f"whole; larger ones go through the data plane"
            )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            log.exception(
                "a request met an unexpected error",
                extra={"method": scope["method"], "path": scope["path"]},
            )
            if started:
                raise  # the server breaks the connection off, so that half an answer is no answer
            await reply(Accident())(scope, receive, send)


def reply(
    error: AtollError, *, code: int | None = None, close: bool = False, paths: bool = False
) -> JSONResponse:
    """The one shape of a refusal; `code` replaces the table's status, `paths` are for an admin."""
    found = statuses.http(error) if code is None else code
    headers = {"WWW-Authenticate": 'Bearer realm="atoll"'} if found == 401 else {}
    if close:
        headers["Connection"] = "close"
    body = ErrorReply(
        code=error.code,
        message=statuses.sentence(error, paths=paths),
        retry=error.retry,
        generation=error.present if isinstance(error, StaleGeneration) else None,
    )
    return JSONResponse(body.model_dump(exclude_none=True), status_code=found, headers=headers)
