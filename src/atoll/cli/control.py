"""`atoll workers`, `pause`, `resume`, `stop`, `kick`, `allow`, `outer-lr`: the operator's hand."""

from pydantic import ValidationError
from rich.table import Table

from atoll import ids
from atoll.cli import output
from atoll.cli.link import linked
from atoll.errors import ConfigError
from atoll.protocol.control import (
    Action,
    AllowRequest,
    CommandRequest,
    ControlReply,
    ControlRequest,
    KickRequest,
    OuterRateRequest,
)
from atoll.protocol.messages import StatusRequest, Workers, WorkersRequest


def workers(url: str, *, token: str | None, fingerprint: str | None, as_json: bool) -> None:
    """Who takes part, who is late, who is kept out."""
    with linked(url, token=token, fingerprint=fingerprint) as link:
        found, control = link.send(WorkersRequest()), link.send(CommandRequest())
        waiting_for = list(link.send(StatusRequest()).waiting_for)
    if as_json:
        output.print_json(
            {
                **found.model_dump(mode="json"),
                "waiting_for": waiting_for,
                "control": control.model_dump(mode="json"),
            }
        )
        return
    output.console.print(_table(found))
    if waiting_for:
        output.say(f"the round waits for {', '.join(waiting_for)}")
    _show(control)


def _table(found: Workers) -> Table:
    return output.table(
        f"generation {found.generation}",
        ("island", "state", "rank", "life", "presence", "heard", "address", "host", "why"),
        (
            (
                w.worker_id,
                w.state,
                w.rank,
                w.incarnation,
                w.presence,
                None if w.seconds_since_heard is None else f"{w.seconds_since_heard:.0f} s ago",
                f"{w.ip_address}:{w.port}" if w.port else w.ip_address,
                w.hostname,
                w.reason or None,
            )
            for w in found.workers
        ),
    )


def order(
    url: str, action: Action, *, token: str | None, fingerprint: str | None, as_json: bool
) -> None:
    """Runs, pauses or stops a run."""
    with linked(url, token=token, fingerprint=fingerprint) as link:
        _report(link.send(ControlRequest(action=action)), as_json=as_json)


def kick(
    url: str, worker_id: str, *, token: str | None, fingerprint: str | None, as_json: bool
) -> None:
    """Takes a worker out."""
    with linked(url, token=token, fingerprint=fingerprint) as link:
        _report(link.send(KickRequest(worker_id=ids.worker_id(worker_id))), as_json=as_json)


def allow(
    url: str, worker_id: str, *, token: str | None, fingerprint: str | None, as_json: bool
) -> None:
    """Lets a worker in again."""
    with linked(url, token=token, fingerprint=fingerprint) as link:
        _report(link.send(AllowRequest(worker_id=ids.worker_id(worker_id))), as_json=as_json)


def outer_lr(
    url: str, lr: float, *, token: str | None, fingerprint: str | None, as_json: bool
) -> None:
    """Changes the outer learning rate from a later round on."""
    with linked(url, token=token, fingerprint=fingerprint) as link:
        try:
            reply = link.send(OuterRateRequest(lr=lr))
        except ValidationError as exc:
            raise ConfigError(f"outer lr={lr} must be a number above 0 and at most 100") from exc
    if as_json:
        output.print_json(reply.model_dump(mode="json"))
        return
    output.say(
        f"outer.lr is {reply.lr} from round {reply.from_round} on, as manifest "
        f"{reply.manifest_sha256[:16]}…"
    )


def _report(reply: ControlReply, *, as_json: bool) -> None:
    if as_json:
        output.print_json(reply.model_dump(mode="json"))
    else:
        _show(reply)


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
