"""`atoll status`: a run as its operator sees it."""

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll.cli import output
from atoll.cli.link import linked
from atoll.cli.options import Target
from atoll.cli.output import number
from atoll.client import pages
from atoll.client.http import HttpClient
from atoll.clock import SystemClock
from atoll.errors import CoordinatorUnreachable
from atoll.protocol.messages import GatherStatus, Status, StatusRequest, WorkerStatus

REFRESH_SECONDS = 1.0
SHOWN_ROUNDS = 12


def status(target: Target, *, watch: bool) -> None:
    """Shows the status once, or until the run is over."""
    with linked(target) as link:
        found = pages.of_workers(link, StatusRequest())
        if target.as_json:
            output.print_json(found.model_dump(mode="json"))
        elif not watch:
            output.console.print(view(found))
        else:
            _watch(link, found)


def _watch(link: HttpClient, found: Status) -> None:
    clock = SystemClock()
    with Live(view(found), console=output.console, auto_refresh=False) as live:
        while found.state != "finished":
            clock.sleep(REFRESH_SECONDS)
            try:
                found = pages.of_workers(link, StatusRequest())
            except CoordinatorUnreachable as error:
                live.update(Group(view(found), Text(str(error))), refresh=True)
                continue
            live.update(view(found), refresh=True)


def view(found: Status) -> Group:
    """The whole status as tables."""
    goal = "" if found.rounds is None else f" of {found.rounds}"
    waiting = f", waiting for {', '.join(found.waiting_for)}" if found.waiting_for else ""
    head = Text(
        f"run {found.name} ({found.run_id}): {found.state}, round {found.version}{goal}, "
        f"{found.tokens} tokens{waiting}"
    )
    ring = f"group {found.group}: {' -> '.join(found.ring)}" if found.group else ""
    notes = [
        ring,
        f"all ranks have saved step {found.consistent}" if found.consistent else "",
        f"newest checkpoint at step {found.checkpoint}" if found.checkpoint else "",
        *found.notes,
        *(_gather_notes(found.gather) if found.gather is not None else []),
        f"storage full: {found.storage_full}" if found.storage_full else "",
        f"damaged: {found.damaged}" if found.damaged else "",
        f"{found.stale_contributions} stale contributions" if found.stale_contributions else "",
        f"{found.resyncs} resyncs" if found.resyncs else "",
        f"refused: {found.refusals}" if found.refusals else "",
    ]
    return Group(
        head,
        history_table(found),
        workers_table(found),
        *([ranks_table(found)] if any(map(_has_stepped, found.workers)) else []),
        Text("; ".join(filter(None, notes))),
    )


def _gather_notes(found: GatherStatus) -> list[str]:
    """Who the round is made of, and what it goes on without."""
    skips = ", ".join(f"{count} {reason}" for reason, count in sorted(found.skips.items()))
    every = ", ".join(f"{count} {reason}" for reason, count in sorted(found.all_skips.items()))
    return [
        f"primaries {', '.join(found.primaries)}" if found.primaries else "",
        f"reserves {', '.join(found.reserves)}" if found.reserves else "",
        f"skipped in this round: {skips}" if skips else "",
        f"skipped in all rounds: {every}" if every else "",
        f"{output.size(found.pulled_bytes)} pulled" if found.pulled_bytes else "",
    ]


def history_table(found: Status) -> Table:
    """The newest rounds and their losses."""
    shown = found.history[-SHOWN_ROUNDS:]
    columns = ["round", "islands", "tokens", "train loss", "held-out loss"]
    is_stale = any(r.staleness for r in found.history)
    rows = (
        (
            *(r.round, r.contributions, r.tokens, number(r.train_loss), number(r.evaluation_loss)),
            *([r.staleness] if is_stale else []),
        )
        for r in shown
    )
    return output.table(None, (*columns, *(["staleness"] if is_stale else [])), rows)


def workers_table(found: Status) -> Table:
    """Who takes part, and how."""
    columns = ("island", "state", "round", "step", "loss", "tokens/s", "sent", "received", "heard")
    return output.table(None, columns, map(_worker_row, found.workers))


def ranks_table(found: Status) -> Table:
    """Where the time of ranks' steps went, and what they sent each other."""
    columns = (
        *("rank", "gather", "compute", "reduce", "step", "communication"),
        *("sent to ranks", "received from ranks", "rolled back", "late"),
    )
    return output.table(None, columns, map(_rank_row, filter(_has_stepped, found.workers)))


def _has_stepped(worker: WorkerStatus) -> bool:
    return worker.telemetry.communication_share is not None


def _rank_row(worker: WorkerStatus) -> tuple[object, ...]:
    told = worker.telemetry
    seconds = (told.gather_seconds, told.compute_seconds, told.reduce_seconds, told.step_seconds)
    return (
        worker.worker_id,
        *(f"{spent:.1f} s" for spent in seconds),
        f"{told.communication_share or 0.0:.0%}",
        output.size(told.rank_bytes_sent),
        output.size(told.rank_bytes_received),
        f"{told.rolled_back_steps} steps",
        f"{told.late_steps} steps",
    )


def _worker_row(worker: WorkerStatus) -> tuple[object, ...]:
    told = worker.telemetry
    state, heard = "away", "-"
    if worker.live:
        state, heard = "live", f"{worker.seconds_since_heard:.0f} s ago"
    work = (told.round, told.step, number(told.loss), f"{told.tokens_per_second:.0f}")
    traffic = (output.size(told.bytes_sent), output.size(told.bytes_received))
    return (worker.worker_id, state, *work, *traffic, heard)
