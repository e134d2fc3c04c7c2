"""The control plane: HTTP routes that translate and decide nothing."""

import asyncio
import itertools
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from atoll.clock import Clock
from atoll.coordinator.planes import operations, request_guard
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, ProtocolError
from atoll.protocol.fields import Whole
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    BarrierName,
    BarrierReply,
    BarrierRequest,
    Done,
    ErrorReply,
    EvaluationReport,
    HeartbeatReply,
    HeartbeatRequest,
    Info,
    LeaveRequest,
    Ready,
    RegisterReply,
    RegisterRequest,
    Status,
    Workers,
)
from atoll.protocol.samples import SamplesRequest
from atoll.wire import statuses

log = logging.getLogger(__name__)

MinWorkers = Annotated[int | None, Query(ge=1, le=2**31)]
_REFUSALS: dict[int | str, dict[str, object]] = {
    code: {"model": ErrorReply} for code in (401, 403, 404, 409, 413, 422, 500, 503)
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

    def next(self) -> asyncio.Event:
        """Set at the first change from now on; taken before looking, no change can be missed."""
        return self._event


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Returns once `event` is set or after `seconds`."""
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

    # What the API looks like is told to nobody without a token; FastAPI's own page would be open.
    app = FastAPI(title="Atoll coordinator", lifespan=lifespan, openapi_url=None)
    app.state.changes = changes
    _install_errors(app, coordinator)
    app.add_middleware(request_guard.Gate, access=access, count=coordinator.refused)
    app.include_router(_open_routes(coordinator))
    app.include_router(_worker_routes(coordinator, changes, clock))
    app.include_router(_admin_routes(coordinator, access, app))
    return app


def _admins_only(coordinator: Coordinator, access: Access) -> Callable[..., None]:
    def check(request: Request) -> None:
        try:
            access.require(request.headers.get("authorization"), Role.ADMIN)
        except AtollError as error:
            coordinator.refused(error)
            raise

    return check


def _open_routes(coordinator: Coordinator) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Done:
        coordinator.check_health()
        return Done()

    return router


def _worker_routes(coordinator: Coordinator, changes: Changes, clock: Clock) -> APIRouter:
    router = APIRouter(responses=_REFUSALS)  # the gate has seen a token of either role

    @router.get("/info")
    def info() -> Info:
        return coordinator.info()

    @router.get("/status")
    def show_status() -> Status:
        return coordinator.status()

    @router.post("/workers/register")
    def register(request: RegisterRequest, http: Request) -> RegisterReply:
        peer = "" if http.client is None else http.client.host
        return coordinator.register(request, peer=peer)

    @router.get("/workers")
    def workers() -> Workers:
        return coordinator.workers()

    @router.get("/training/ready")
    def ready(min_workers: MinWorkers = None) -> Ready:
        return coordinator.ready(min_workers)

    @router.post("/generations/{number}/barriers/{name}")
    async def barrier(number: Whole, name: BarrierName, request: BarrierRequest) -> BarrierReply:
        deadline = clock.now() + request.wait_seconds
        while True:
            changed = changes.next()
            reply = await run_in_threadpool(coordinator.barrier, number, name, request)
            left = deadline - clock.now()
            if reply.complete or left <= 0 or changes.closed:
                return reply
            await _within(changed, left)

    @router.delete("/workers/{worker_id}")
    def deregister(worker_id: str, request: LeaveRequest) -> Done:
        _same_worker(worker_id, request.identity.worker_id)
        coordinator.deregister(request.identity)
        return Done()

    # Without a thread and without checking our own answer: the call of which there are most, and
    # it waits for nothing.
    @router.post("/workers/{worker_id}/heartbeat", response_model=HeartbeatReply)
    async def heartbeat(worker_id: str, request: HeartbeatRequest) -> Response:
        _same_worker(worker_id, request.identity.worker_id)
        reply = coordinator.heartbeat(request)
        return Response(reply.model_dump_json(), media_type="application/json")

    @router.post("/workers/{worker_id}/assignment")
    async def assignment(worker_id: str, request: AssignmentRequest) -> Assignment:
        _same_worker(worker_id, request.identity.worker_id)
        deadline = clock.now() + request.wait_seconds
        begun = False
        while True:
            changed = changes.next()
            reply = await run_in_threadpool(coordinator.assignment, request, begun=begun)
            begun = True
            left = deadline - clock.now()
            if reply.answers(request) or left <= 0 or changes.closed:
                return reply
            await _within(changed, left)

    @router.post("/workers/{worker_id}/samples")
    def samples(worker_id: str, request: SamplesRequest) -> Done:
        _same_worker(worker_id, request.identity.worker_id)
        coordinator.keep_samples(request)
        return Done()

    @router.post("/workers/{worker_id}/evaluation")
    def evaluation(worker_id: str, report: EvaluationReport) -> Done:
        _same_worker(worker_id, report.identity.worker_id)
        coordinator.evaluation(report)
        return Done()

    operations.add_figures(router, coordinator)
    return router


def _admin_routes(coordinator: Coordinator, access: Access, app: FastAPI) -> APIRouter:
    only = Depends(_admins_only(coordinator, access))
    router = APIRouter(dependencies=[only], responses=_REFUSALS)

    @router.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @router.get("/ledger", response_class=StreamingResponse)
    def ledger() -> StreamingResponse:
        """A consistent copy of the ledger as an SQLite file, for audit and export of a live run."""
        pieces = _ledger_copy(coordinator)
        first = next(pieces)  # a copy that cannot be made is refused before the answer begins
        return StreamingResponse(
            itertools.chain([first], pieces), media_type="application/vnd.sqlite3"
        )

    operations.add_control(router, coordinator)
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


def _install_errors(app: FastAPI, coordinator: Coordinator) -> None:
    @app.exception_handler(AtollError)
    async def refused(_: Request, error: AtollError) -> JSONResponse:
        if statuses.http(error) >= 500 and not error.retry:
            # The sender cannot help it: whoever runs the coordinator must see it.
            log.error("a request found a fault", extra={"code": error.code, "reason": str(error)})
        return request_guard.reply(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        refusal = ProtocolError(f"{name}: {first['msg']}")
        coordinator.refused(refusal)
        return request_guard.reply(refusal)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return request_guard.reply(ProtocolError(str(error.detail)), code=error.status_code)
