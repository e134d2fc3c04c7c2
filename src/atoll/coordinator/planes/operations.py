"""What an operator asks for over HTTP: control of the run, and figures about it."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from atoll.coordinator.service import Coordinator
from atoll.coordinator.shown import metrics
from atoll.protocol.control import (
    ControlReply,
    ControlRequest,
    KickRequest,
    OuterRateReply,
    OuterRateRequest,
)
from atoll.protocol.samples import MAX_PAGE, SampleHistory
from atoll.protocol.work import Work

Position = Annotated[int, Query(ge=0, le=2**53)]
Page = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Name = Annotated[str | None, Query(max_length=64)]


def add_control(router: APIRouter, coordinator: Coordinator) -> None:
    """Routes that change the run; the caller's router is for admins only."""

    @router.get("/control")
    def control() -> ControlReply:
        return coordinator.control()

    @router.post("/control")
    def order(request: ControlRequest) -> ControlReply:
        return coordinator.order(request.action)

    @router.post("/control/kick")
    def kick(request: KickRequest) -> ControlReply:
        return coordinator.kick(request.worker_id)

    @router.post("/control/allow")
    def allow(request: KickRequest) -> ControlReply:
        return coordinator.allow(request.worker_id)

    @router.post("/control/outer-lr")
    def outer_lr(request: OuterRateRequest) -> OuterRateReply:
        return coordinator.set_outer_lr(request.lr)


def add_figures(router: APIRouter, coordinator: Coordinator) -> None:
    """Routes that only show."""

    @router.get("/metrics", response_class=Response)
    def prometheus() -> Response:
        return Response(metrics.render(coordinator.status()), media_type=metrics.CONTENT_TYPE)

    @router.get("/work")
    def work() -> Work:
        return coordinator.work()

    @router.get("/metrics/history")
    def history(worker_id: Name = None, after: Position = 0, limit: Page = 1000) -> SampleHistory:
        return coordinator.samples.history(worker_id=worker_id, after=after, limit=limit)
