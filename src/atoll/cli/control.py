"""`atoll workers`, `pause`, `resume`, `stop`, `kick`, `allow`, `outer-lr`: the operator's hand."""

from pydantic import ValidationError

from atoll import ids
from atoll.cli import output
from atoll.cli.link import answer, linked
from atoll.cli.options import Target
from atoll.client import pages
from atoll.errors import ConfigError
from atoll.protocol.control import (
    Action,
    AllowRequest,
    CommandRequest,
    ControlReply,
    ControlRequest,
    KickRequest,
    OuterRateReply,
    OuterRateRequest,
)
from atoll.protocol.messages import StatusRequest, WorkerEntry, WorkersRequest


def workers(target: Target) -> None:
    """Who takes part, who is late, who is kept out."""
    with linked(target) as link:
        found = pages.of_workers(link, WorkersRequest())
        control = link.send(CommandRequest())
        waiting_for = list(link.send(StatusRequest(limit=1)).waiting_for)
    if target.as_json:
        told, ordered = found.model_dump(mode="json"), control.model_dump(mode="json")
        output.print_json({**told, "waiting_for": waiting_for, "control": ordered})
        return
    title = f"generation {found.generation}"
    columns = ("island", "state", "rank", "life", "presence", "heard", "address", "host", "why")
    output.console.print(output.table(title, columns, map(_row, found.workers)))
    if waiting_for:
        output.say(f"the round waits for {', '.join(waiting_for)}")
    _show(control)


def _row(worker: WorkerEntry) -> tuple[object, ...]:
    since, host = worker.seconds_since_heard, worker.ip_address
    heard = None if since is None else f"{since:.0f} s ago"
    address = f"{host}:{worker.port}" if worker.port else host
    told = (worker.worker_id, worker.state, worker.rank, worker.incarnation, worker.presence)
    return (*told, heard, address, worker.hostname, worker.reason or None)


def order(target: Target, action: Action) -> None:
    """Runs, pauses or stops a run."""
    answer(target, ControlRequest(action=action), _show)


def kick(target: Target, worker_id: str) -> None:
    """Takes a worker out."""
    answer(target, KickRequest(worker_id=ids.worker_id(worker_id)), _show)


def allow(target: Target, worker_id: str) -> None:
    """Lets a worker in again."""
    answer(target, AllowRequest(worker_id=ids.worker_id(worker_id)), _show)


def outer_lr(target: Target, lr: float) -> None:
    """Changes the outer learning rate from a later round on."""
    try:
        message = OuterRateRequest(lr=lr)
    except ValidationError as exc:
        raise ConfigError(f"outer lr={lr} must be a number above 0 and at most 100") from exc
    answer(target, message, _show_rate)


def _show_rate(reply: OuterRateReply) -> None:
    output.say(
        f"outer.lr is {reply.lr} from round {reply.from_round} on, as manifest "
        f"{reply.manifest_sha256[:16]}…"
    )


_MEANING = {
    "run": "the run goes on",
    "pause": "the run pauses once the round under way is closed",
    "stop": "the run stops once the round under way is closed, and saves a snapshot",
}


def _show(reply: ControlReply) -> None:
    output.say(f"{_MEANING[reply.command.action]} (command {reply.command.number})")
    if reply.missing:
        output.say(f"not acknowledged yet by {', '.join(reply.missing)}")
    if reply.kicked:
        output.say(f"kept out: {', '.join(reply.kicked)}")
