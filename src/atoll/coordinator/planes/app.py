"""The control plane: the table of messages as HTTP routes, which translate and decide nothing."""

import asyncio
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from atoll.clock import Clock
from atoll.coordinator import handlers
from atoll.coordinator.authority import Authority
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.planes import json_bodies, request_guard
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.shown import metrics
from atoll.errors import AtollError, ProtocolError
from atoll.protocol.exchange import Ask, Waiting
from atoll.protocol.messages import ErrorReply
from atoll.wire import statuses

log = logging.getLogger(__name__)

_REFUSALS: dict[int | str, dict[str, object]] = {
    code: {"model": ErrorReply} for code in (401, 403, 404, 409, 413, 422, 500, 503)
}


class LongPolls:
    """Wakes waiting requests when the coordinator's state moved.

    `notify` may be called from any thread; everything else belongs to the event loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # once somebody waits
        self._event = asyncio.Event()
        self.closed = False

    def notify(self) -> None:
        """Called by the coordinator from whatever thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fire)

    def _fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def close(self) -> None:
        """The server stops: nobody waits any more."""
        self.closed = True
        self._event.set()

    def next(self) -> asyncio.Event:
        """Set at the first change from now on; taken before looking, no change can be missed."""
        self._loop = asyncio.get_running_loop()
        return self._event


def create(coordinator: Authority, access: Access, clock: Clock) -> FastAPI:
    """The application of one coordinator."""
    long_polls = LongPolls()
    coordinator.on_change(long_polls.notify)
    # What the API looks like is told to nobody without a token; FastAPI's own page would be open.
    app = FastAPI(title="Atoll coordinator", openapi_url=None, redirect_slashes=False)
    # Redirects to `path` from `path/` would be made of the Host header, which is anybody's.
    app.router.route_class = json_bodies.JsonRoute
    app.state.long_polls = long_polls
    _install_errors(app, coordinator, access)
    app.add_middleware(
        request_guard.RequestGuard,
        access=access,
        count=coordinator.refused,
        open_paths={k.route.path for k in handlers.HANDLERS if k.route.sender == "anyone"},
    )

    def admins_only(request: Request) -> None:
        with coordinator.refusals():
            access.require(request.headers.get("authorization"), Role.ADMIN)

    admin = [Depends(admins_only)]
    for kind in handlers.HANDLERS:
        route = kind.route
        app.add_api_route(
            route.path,
            _endpoint(kind, coordinator, long_polls, clock),
            methods=[route.method],
            name=kind.__name__,
            description=kind.__doc__ or "",
            response_model=kind.reply(),
            # A token of either role is enough otherwise, and the guard has seen one.
            dependencies=admin if route.sender == "admin" else [],
            responses={} if route.sender == "anyone" else _REFUSALS,
        )
    _add_special_routes(app, coordinator, admin)
    return app


def _endpoint(
    kind: type[Ask[Any]], coordinator: Authority, long_polls: LongPolls, clock: Clock
) -> Callable[..., Any]:
    """What answers one message, whatever it says."""

    # Our own answers are not checked again: that would cost more than most of them take to make.
    async def endpoint(http: Request, message: Ask[Any] | None = None, **path: str) -> Response:
        message = message or kind()
        with coordinator.refusals():
            message.check_path(path)
        arrival = Arrival(peer="" if http.client is None else http.client.host)
        deadline = clock.now() + (message.wait_seconds if isinstance(message, Waiting) else 0.0)
        while True:
            changed = long_polls.next()
            if kind.route.in_loop:
                reply = handlers.answer(coordinator, message, arrival)
            else:
                reply = await run_in_threadpool(handlers.answer, coordinator, message, arrival)
            left = deadline - clock.now()
            if message.is_answered(reply) or left <= 0 or long_polls.closed:
                return Response(reply.model_dump_json(), media_type="application/json")
            arrival = replace(arrival, again=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    endpoint.__signature__ = _signature(kind)  # type: ignore[attr-defined]  # what FastAPI reads
    return endpoint


def _signature(kind: type[Ask[Any]]) -> inspect.Signature:
    """What FastAPI is to read of a request: names in the path, and the message."""
    given: dict[str, Any] = {"http": Request} | dict.fromkeys(kind.route.names, str)
    if kind.model_fields:
        given["message"] = Annotated[kind, Query()] if kind.in_query() else kind
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, keyword, annotation=type_) for name, type_ in given.items()]
    )


def _add_special_routes(app: FastAPI, coordinator: Authority, admin: list[Any]) -> None:
    """What is answered with something else than a message."""

    @app.get("/metrics", response_class=Response, responses=_REFUSALS)
    def prometheus() -> Response:
        return Response(metrics.render(coordinator.status()), media_type=metrics.CONTENT_TYPE)

    @app.get("/openapi.json", include_in_schema=False, dependencies=admin)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/ledger", response_class=StreamingResponse, responses=_REFUSALS, dependencies=admin)
    def ledger() -> StreamingResponse:
        """A consistent copy of the ledger as an SQLite file, for audit and export of a live run."""
        pieces = _ledger_copy(coordinator)
        first = [next(pieces)]  # a copy that cannot be made is refused before the answer begins
        return StreamingResponse(chain(first, pieces), media_type="application/vnd.sqlite3")


def _ledger_copy(coordinator: Authority) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="atoll-ledger-") as directory:
        path = Path(directory) / "ledger.sqlite"
        coordinator.ledger.copy_to(str(path))
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece


def _install_errors(app: FastAPI, coordinator: Authority, access: Access) -> None:
    @app.exception_handler(AtollError)
    async def refused(request: Request, error: AtollError) -> JSONResponse:
        # The sender cannot help it: whoever runs the coordinator must see it.
        statuses.log_fault(log, "a request found a fault", error)
        is_admin = access.is_admin(request.headers.get("authorization"))
        return request_guard.reply(error, paths=is_admin)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        why = first.get("ctx", {}).get("error")  # of a body that is no good JSON
        refusal = ProtocolError(f"{name}: {first['msg']}{f' ({why})' if why else ''}")
        coordinator.refused(refusal)
        return request_guard.reply(refusal)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return request_guard.reply(ProtocolError(str(error.detail)), code=error.status_code)
