"""The control plane: the table of messages as HTTP routes, which translate and decide nothing."""

import inspect
import logging
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from atoll.clock import Clock
from atoll.coordinator import handlers
from atoll.coordinator.authority import Authority
from atoll.coordinator.planes import request_guard
from atoll.coordinator.planes.access import Access
from atoll.coordinator.planes.answer_places import AnswerPlaces
from atoll.coordinator.planes.answering import Answering, LongPolls
from atoll.coordinator.shown import metrics
from atoll.errors import AtollError, FrameTooLarge, ProtocolError
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import ErrorReply
from atoll.wire import statuses

log = logging.getLogger(__name__)

_REFUSALS: dict[int | str, dict[str, object]] = {
    code: {"model": ErrorReply} for code in (401, 403, 404, 409, 413, 422, 500, 503)
}


def create(
    coordinator: Authority, access: Access, clock: Clock, *, places: AnswerPlaces | None = None
) -> FastAPI:
    """The application of one coordinator."""
    long_polls = LongPolls()
    coordinator.on_change(long_polls.notify)
    # What the API looks like is told to nobody without a token; FastAPI's own page would be open.
    # Redirects to `path` from `path/` would be made of the Host header, which is anybody's.
    app = FastAPI(title="Atoll coordinator", openapi_url=None, redirect_slashes=False)
    app.state.long_polls = long_polls
    _install_errors(app, access)
    app.add_middleware(
        request_guard.RequestGuard,
        access=access,
        count=coordinator.refused,
        open_paths={k.route.path for k in handlers.HANDLERS if k.route.sender == "anyone"},
        max_body_bytes=max(k.route.max_body_bytes for k in handlers.HANDLERS),
    )
    answering = Answering(coordinator, access, clock, long_polls, places or AnswerPlaces())
    for kind in handlers.HANDLERS:
        route = kind.route
        app.router.add_api_route(
            route.path,
            _endpoint(kind, answering),
            methods=[route.method],
            name=kind.__name__,
            description=kind.__doc__ or "",
            response_model=kind.reply(),
            responses={} if route.sender == "anyone" else _REFUSALS,
            route_class_override=_MessageRoute,
        )
    _add_special_routes(app, answering)
    return app


class _MessageRoute(APIRoute):
    """FastAPI describes what a message is; it is read and checked here, within its limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint


def _endpoint(kind: type[Ask[Any]], answering: Answering) -> Callable[..., Any]:
    """What answers one message, whatever it says."""

    async def endpoint(http: Request) -> Response:
        return await answering.answer(http, kind)

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


def _add_special_routes(app: FastAPI, answering: Answering) -> None:
    """What is answered with something else than a message."""
    coordinator, admin = answering.coordinator, [Depends(answering.admins_only)]

    @app.get("/metrics", response_class=Response, responses=_REFUSALS)
    async def prometheus(http: Request) -> Response:
        def make() -> Awaitable[bytes]:
            return run_in_threadpool(lambda: metrics.render(coordinator.status()))

        return await answering.large(http, make, metrics.CONTENT_TYPE)

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


def _install_errors(app: FastAPI, access: Access) -> None:
    @app.exception_handler(AtollError)
    async def refused(http: Request, error: AtollError) -> JSONResponse:
        # The sender cannot help it: whoever runs the coordinator must see it.
        statuses.log_fault(log, "a request found a fault", error)
        is_admin = access.is_admin(http.headers.get("authorization"))
        # The rest of a body that is too large is not read.
        is_unread = isinstance(error, FrameTooLarge)
        return request_guard.reply(error, close=is_unread, paths=is_admin)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return request_guard.reply(ProtocolError(str(error.detail)), code=error.status_code)
