"""What the coordinator does with each message: one handler for each, and nothing of a transport.

HTTP and the in-memory link both come through `answer`. A message without a handler has no route;
one that is for runs of another kind is refused by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from atoll.coordinator.authority import Authority
from atoll.coordinator.service import Coordinator
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.errors import ProtocolError
from atoll.protocol import control, gather, messages, samples, sharded, work
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Done

R = TypeVar("R", bound=BaseModel)
M = TypeVar("M", bound=Ask[Any])
C = TypeVar("C", bound=Authority)


@dataclass(frozen=True)
class Arrival:
    """How a message came in."""

    peer: str = ""  # the address it came from
    again: bool = False  # it waits, and this is not the first look at it


Handler = Callable[[C, M, Arrival], BaseModel | None]

HANDLERS: dict[type[Ask[Any]], Handler[Any, Any]] = {}
_ONLY: dict[type[Ask[Any]], type[Authority]] = {}  # messages that not every run answers


def on(kind: type[M], handler: Handler[Authority, M]) -> None:
    """Messages of `kind` are answered by `handler`; one that returns nothing answers `Done`."""
    HANDLERS[kind] = handler


def only(run: type[C], kind: type[M], handler: Handler[C, M]) -> None:
    """As `on`, for messages that only runs with this kind of coordinator answer."""
    HANDLERS[kind], _ONLY[kind] = handler, run


def answer(coordinator: Authority, message: Ask[R], arrival: Arrival) -> R:
    """What the coordinator says to `message`; a refusal is a typed error."""
    kind = type(message)
    if kind in _ONLY:
        with coordinator.refusals():
            check_kind(coordinator, _ONLY[kind], kind.__name__)
    reply: Any = HANDLERS[kind](coordinator, message, arrival)
    return reply or Done()  # type: ignore[return-value]  # `Done` where the message says so


def check_kind(coordinator: Authority, run: type[C], name: str) -> C:
    """The coordinator, if it is of this kind; ProtocolError for a message `name` of another."""
    if not isinstance(coordinator, run):
        raise ProtocolError(
            f"{name} is not a message of run {coordinator.run_id!r}, whose strategy trains another "
            f"way; fetch /info and speak as its strategy asks"
        )
    return coordinator


on(messages.HealthRequest, lambda c, _, __: c.disk.check())
on(messages.InfoRequest, lambda c, m, _: c.info(m.manifest))
on(messages.RegisterRequest, lambda c, m, arrival: c.register(m, peer=arrival.peer))
on(messages.HeartbeatRequest, lambda c, m, _: c.heartbeat(m))
only(
    Coordinator,
    messages.AssignmentRequest,
    lambda c, m, arrival: c.assignment(m, begun=arrival.again),
)
only(Coordinator, messages.EvaluationReport, lambda c, m, _: c.evaluation(m))
only(Coordinator, gather.AnnounceRequest, lambda c, m, a: c.announce(m, begun=a.again))
only(Coordinator, gather.WindowRequest, lambda c, m, _: c.window(m))
on(messages.BarrierRequest, lambda c, m, _: c.barrier(m))
on(messages.LeaveRequest, lambda c, m, _: c.deregister(m.identity))
on(samples.SamplesRequest, lambda c, m, _: c.keep_samples(m))

only(ShardedCoordinator, sharded.GroupRequest, lambda c, m, a: c.group(m, begun=a.again))
only(ShardedCoordinator, sharded.SaveReport, lambda c, m, _: c.saved(m))
only(ShardedCoordinator, sharded.PartReport, lambda c, m, a: c.part(m, begun=a.again))
only(ShardedCoordinator, sharded.BoundaryRequest, lambda c, m, a: c.boundary(m, begun=a.again))
only(ShardedCoordinator, sharded.MissingReport, lambda c, m, _: c.missing(m))

on(messages.StatusRequest, lambda c, m, _: m.page(c.status()))
on(messages.WorkersRequest, lambda c, m, _: m.page(c.workers()))
on(messages.ReadyRequest, lambda c, m, _: m.page(c.ready(m.min_workers)))
on(work.WorkRequest, lambda c, m, _: m.page(c.work()))
on(
    samples.HistoryRequest,
    lambda c, m, _: c.samples.history(worker_id=m.worker_id, after=m.after, limit=m.limit),
)

on(control.CommandRequest, lambda c, _, __: c.control())
on(control.ControlRequest, lambda c, m, _: c.order(m.action))
on(control.KickRequest, lambda c, m, _: c.kick(m.worker_id))
on(control.AllowRequest, lambda c, m, _: c.allow(m.worker_id))
only(Coordinator, control.OuterRateRequest, lambda c, m, _: c.set_outer_lr(m.lr))
