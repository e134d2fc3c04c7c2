"""The control plane: HTTP routes that translate and decide nothing."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.clock import Clock
from atoll.coordinator import status
from atoll.coordinator.access import Access, Role
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameTooLarge, ProtocolError
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    Done,
    ErrorReply,
    EvaluationReport,
    HeartbeatReply,
    HeartbeatRequest,
    Info,
    LeaveRequest,
    RegisterReply,
    RegisterRequest,
    Status,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
_REFUSALS: dict[int | str, dict[str, object]] = {
    code: {"model": ErrorReply} for code in (401, 403, 404, 409, 413, 422)
}


class Changes:
    """Wakes waiting requests when the coordinator's state moved, from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self.closed = False

    def attach(self) -> None:
        """Binds to the running loop."""
        self._loop = asyncio.get_running_loop()

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

    async def wait(self, seconds: float) -> None:
        """Returns at the next change or after `seconds`."""
        event = self._event
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return


def create(coordinator: Coordinator, access: Access, clock: Clock) -> FastAPI:
    """The application of one coordinator."""
    changes = Changes()
    coordinator.on_change(changes.notify)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        changes.attach()
        yield

    app = FastAPI(title="Atoll coordinator", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi_url = None  # what the API looks like is told to nobody without a token
    app.state.changes = changes
    _install_errors(app)
    app.add_middleware(BoundedBody, limit=MAX_BODY_BYTES)
    app.include_router(_open_routes())
    app.include_router(_worker_routes(coordinator, access, changes, clock))
    app.include_router(_admin_routes(coordinator, access, app))
    return app


def _guard(access: Access, role: Role) -> Callable[..., None]:
    def check(authorization: str | None = Header(default=None)) -> None:
        access.require(authorization, role)

    return check


def _open_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Done:
        return Done()

    return router


def _worker_routes(
    coordinator: Coordinator, access: Access, changes: Changes, clock: Clock
) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_guard(access, Role.WORKER))], responses=_REFUSALS)

    @router.get("/info")
    def info() -> Info:
        return coordinator.info()

    @router.get("/status")
    def show_status() -> Status:
        return coordinator.status()

    @router.post("/workers/register")
    def register(request: RegisterRequest) -> RegisterReply:
        return coordinator.register(request)

    @router.delete("/workers/{worker_id}")
    def deregister(worker_id: str, request: LeaveRequest) -> Done:
        _same_worker(worker_id, request.identity.worker_id)
        coordinator.deregister(request.identity)
        return Done()

    @router.post("/workers/{worker_id}/heartbeat")
    def heartbeat(worker_id: str, request: HeartbeatRequest) -> HeartbeatReply:
        _same_worker(worker_id, request.identity.worker_id)
        return coordinator.heartbeat(request)

    @router.post("/workers/{worker_id}/assignment")
    async def assignment(worker_id: str, request: AssignmentRequest) -> Assignment:
        _same_worker(worker_id, request.identity.worker_id)
        deadline = clock.now() + request.wait_seconds
        while True:
            reply = await run_in_threadpool(coordinator.assignment, request)
            left = deadline - clock.now()
            if reply.action != "wait" or left <= 0 or changes.closed:
                return reply
            await changes.wait(left)

    @router.post("/workers/{worker_id}/evaluation")
    def evaluation(worker_id: str, report: EvaluationReport) -> Done:
        _same_worker(worker_id, report.identity.worker_id)
        coordinator.evaluation(report)
        return Done()

    return router


def _admin_routes(coordinator: Coordinator, access: Access, app: FastAPI) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_guard(access, Role.ADMIN))], responses=_REFUSALS)

    @router.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @router.get("/ledger", response_class=StreamingResponse)
    def ledger() -> StreamingResponse:
        """A consistent copy of the ledger as an SQLite file, for audit and export of a live run."""
        return StreamingResponse(_ledger_copy(coordinator), media_type="application/vnd.sqlite3")

    return router


def _ledger_copy(coordinator: Coordinator) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="atoll-ledger-") as directory:
        path = Path(directory) / "ledger.sqlite"
        coordinator.copy_ledger(str(path))
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece


def _same_worker(path: str, body: str) -> None:
    if path != body:
        raise ProtocolError(f"the path names worker {path!r}, the body {body!r}; they must agree")


def _install_errors(app: FastAPI) -> None:
    @app.exception_handler(AtollError)
    async def refused(_: Request, error: AtollError) -> JSONResponse:
        return _reply(error, status.http(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        return _reply(ProtocolError(f"{name}: {first['msg']}"), 422)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return _reply(ProtocolError(str(error.detail)), error.status_code)


def _reply(error: AtollError, code: int) -> JSONResponse:
    reply = ErrorReply(code=error.code, message=str(error), retry=error.retry)
    headers = {"WWW-Authenticate": 'Bearer realm="atoll"'} if code == 401 else None
    return JSONResponse(reply.model_dump(), status_code=code, headers=headers)


class BoundedBody:
    """Refuses a body that does not say its size, or is too large, before any of it is read."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._fits(Headers(scope=scope)):
            error = FrameTooLarge(
                f"a body must declare a Content-Length of at most {self._limit} bytes"
            )
            await _reply(error, status.http(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fits(self, headers: Headers) -> bool:
        declared = headers.get("content-length", "0")
        return (
            "transfer-encoding" not in headers
            and declared.isdigit()
            and int(declared) <= self._limit
        )
