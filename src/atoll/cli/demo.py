"""`atoll demo`: a coordinator and islands as real processes of this machine, watched to the end."""

import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll import config
from atoll.cli import audit as auditing
from atoll.cli import output
from atoll.cli.join import RANK_FIGURES
from atoll.cli.options import Records
from atoll.client.http import HttpClient
from atoll.clock import SystemClock
from atoll.data import base as data
from atoll.data import registry as datasets
from atoll.errors import AtollError, ConfigError, CoordinatorUnreachable
from atoll.launch import local
from atoll.launch.local import LocalCoordinator, LocalIsland, Tokens
from atoll.proof import audit, losses
from atoll.protocol.messages import Status, StatusRequest, Telemetry
from atoll.simulate.cluster import worker_name
from atoll.strategies import registry

POLL_SECONDS = 0.25
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Summary:
    """What the demo shows at its end."""

    rounds: int
    islands: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    unigram_entropy: float
    tokens_per_second: dict[str, float]
    bytes_sent: int  # by all islands
    bytes_received: int
    all_reduce_bytes: int  # what all-reduce every step would have sent, all islands, ring, fp32
    steps: int  # of a sharded run: those that it consists of
    rank_bytes_sent: int  # of a sharded run: to other ranks, by all, saves included
    communication: float | None  # of a sharded run: its share of the ranks' seconds
    seconds: float
    digest: str | None
    audit_clean: bool
    audit_replayed_rounds: int
    audit_checkpoints: int  # of a sharded run: those whose weights were read and compared


def demo(run_file: Path, *, islands: int, directory: Path | None, as_json: bool) -> None:
    """Trains, audits, and ends in a table; exit code 1 when anything does not hold."""
    _check(run_file, islands)
    # A demo that is told to end takes its processes along, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        home = directory or Path(stack.enter_context(TemporaryDirectory(prefix="atoll-demo-")))
        clock = SystemClock()
        began = clock.now()
        tokens = Tokens(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        coordinator = local.start_coordinator(run_file, home, tokens=tokens, options=["--stay"])
        stack.callback(coordinator.kill)
        output.stderr.print(f"coordinator starts; state and logs in {str(home)!r}")
        coordinator.wait_ready()
        started: list[LocalIsland] = []
        for name in map(worker_name, range(islands)):
            place = home / "islands" / name
            island = local.start_island(coordinator.url, place, worker_id=name, tokens=tokens)
            stack.callback(island.kill)
            started.append(island)
        output.stderr.print(f"{islands} islands join {coordinator.url}")
        _watch(coordinator, started, tokens)
        coordinator.terminate()
        for process in (coordinator, *started):
            if process.wait(timeout_seconds=60) != 0:
                raise AtollError(f"{process.name} failed; its log:\n{process.log_tail()}")
        results = [island.result() for island in started]
        summary = _summary(run_file, home, results, seconds=clock.now() - began)
    if as_json:
        output.print_json(asdict(summary))
    else:
        _show(summary, kept=directory)
    if not summary.audit_clean:
        raise typer.Exit(1)


def _check(run_file: Path, islands: int) -> None:
    """Refuses a run file that cannot be read, and too few islands for a round to begin."""
    membership = config.load(run_file).settings.get("membership", {})
    needed = max(1, membership.get("min_workers", 1))
    if islands < needed:
        raise ConfigError(
            f"--islands {islands} is below membership.min_workers={needed}; start at least {needed}"
        )


def _watch(coordinator: LocalCoordinator, islands: list[LocalIsland], tokens: Tokens) -> None:
    """Follows the run with a live display until it is over."""
    clock = SystemClock()
    deadline = clock.now() + LIMIT_SECONDS
    with closing(HttpClient(coordinator.url, token=tokens.admin)) as link:
        last = link.send(StatusRequest())
        with _display(last) as show:
            is_over = False
            while not is_over:
                for process in (coordinator, *islands):
                    has_ended = not process.is_running()
                    if has_ended and (process is coordinator or process.popen.returncode != 0):
                        raise AtollError(f"{process.name} failed; its log:\n{process.log_tail()}")
                if clock.now() > deadline:
                    raise AtollError(f"the demo did not end within {LIMIT_SECONDS:.0f} s")
                # Looked at before the status: the last one shown has all that the islands told.
                is_over = last.state == "finished" and not any(p.is_running() for p in islands)
                clock.sleep(POLL_SECONDS)
                try:
                    last = link.send(StatusRequest())
                except CoordinatorUnreachable:
                    is_over = False  # a busy machine: asked again
                    continue
                show(last)


@contextmanager
def _display(first: Status) -> Iterator[Callable[[Status], None]]:
    """A progress bar on a terminal; one line per round elsewhere."""
    if not output.stderr.is_terminal:
        shown = {0}

        def lines(status: Status) -> None:
            is_over = status.state == "finished" and not any(w.live for w in status.workers)
            for entry in status.history:
                is_whole = entry.round < status.version or is_over
                if is_whole and entry.round not in shown and entry.evaluation_loss is not None:
                    shown.add(entry.round)
                    output.stderr.print(
                        f"round {entry.round:3d}: train loss {output.number(entry.train_loss)}, "
                        f"held-out loss {output.number(entry.evaluation_loss)}"
                    )

        yield lines
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    task = bar.add_task("waiting for islands", total=first.rounds)
    with Live(bar, console=output.stderr):

        def draw(status: Status) -> None:
            losses_seen = [h.evaluation_loss for h in status.history if h.evaluation_loss]
            loss = f", held-out loss {losses_seen[-1]:.3f}" if losses_seen else ""
            rate = sum(w.telemetry.tokens_per_second for w in status.workers if w.live)
            told = f"{status.state}{loss}, {rate:.0f} tokens/s"
            bar.update(task, completed=status.version, description=told)

        yield draw


def _summary(
    run_file: Path, home: Path, results: list[dict[str, Any]], *, seconds: float
) -> Summary:
    loaded = config.load(run_file)
    dataset = datasets.open_dataset(loaded.data, location=loaded.data_location)
    with auditing.opened(Records(directory=home)) as run:
        report = audit.audit(run.ledger, run.blobs, layout=run.layout, with_replay=True)
        with run.ledger.reading() as t:
            held_out = losses.held_out_losses(t)
        by_step = registry.any_of(run.manifest).by_step
        steps = report.tokens // (run.manifest.inner.batch * dataset.block)
        # What one island sends in one ring all-reduce of fp32 gradients.
        ring_bytes = 2 * run.layout.nbytes * (len(results) - 1) // len(results)
    told = [Telemetry.model_validate({k: r[k] for k in RANK_FIGURES}) for r in results if by_step]
    return Summary(
        rounds=report.rounds,
        islands=len(results),
        tokens=report.tokens,
        loss_first=held_out.get(1 if by_step else 0),
        loss_last=held_out.get(report.rounds),
        unigram_entropy=data.unigram_entropy(dataset),
        tokens_per_second={r["worker_id"]: r["tokens_per_second"] for r in results},
        bytes_sent=sum(r["bytes_sent"] for r in results),
        bytes_received=sum(r["bytes_received"] for r in results),
        all_reduce_bytes=0 if by_step else ring_bytes * steps,
        steps=steps if by_step else 0,
        rank_bytes_sent=sum(one.rank_bytes_sent for one in told),
        communication=_communication(told),
        seconds=seconds,
        digest=report.digest,
        audit_clean=report.clean,
        audit_replayed_rounds=report.replayed_rounds,
        audit_checkpoints=report.checkpoints_read or 0,
    )


def _communication(told: list[Telemetry]) -> float | None:
    """The mean share of all ranks; None where there are none."""
    shares = [share for one in told if (share := one.communication_share) is not None]
    return sum(shares) / len(shares) if shares else None


def _show(summary: Summary, *, kept: Path | None) -> None:
    clean = f"clean, {summary.audit_replayed_rounds} rounds replayed bit for bit"
    if summary.steps:  # nothing is replayed: only ranks together can make a step again
        clean = f"clean, {summary.audit_checkpoints} checkpoints verified"
    rates = ", ".join(f"{n} {v:.0f}" for n, v in sorted(summary.tokens_per_second.items()))
    rows: list[tuple[str, str | None]] = [
        ("rounds", str(summary.rounds)),
        *([("steps", str(summary.steps))] if summary.steps else []),
        ("tokens", str(summary.tokens)),
        ("held-out loss, first", output.number(summary.loss_first)),
        ("held-out loss, last", output.number(summary.loss_last)),
        ("unigram entropy of the data", output.number(summary.unigram_entropy)),
        ("tokens/s", rates),
        *_traffic(summary),
        ("audit", clean if summary.audit_clean else "NOT clean; run `atoll audit --replay`"),
        ("params digest", (summary.digest or "")[:16] + "…"),
        ("time", f"{summary.seconds:.0f} s"),
    ]
    output.console.print(output.table(None, (f"{summary.islands} islands", ""), rows))
    if kept is not None:
        output.say(f"state kept in {str(kept)!r}: atoll export {kept} -o model.safetensors")


def _traffic(summary: Summary) -> list[tuple[str, str | None]]:
    """What travelled: to and from the coordinator, and beside it."""
    if summary.steps:
        return [
            ("sent between ranks", output.size(summary.rank_bytes_sent)),
            ("time spent waiting for ranks", f"{summary.communication or 0.0:.0%}"),
            ("sent to the coordinator", output.size(summary.bytes_sent)),
        ]
    saved = summary.all_reduce_bytes / max(1, summary.bytes_sent)
    return [
        ("sent by islands", output.size(summary.bytes_sent)),
        ("received by islands", output.size(summary.bytes_received)),
        (
            "all-reduce every step would send",
            f"{output.size(summary.all_reduce_bytes)} ({saved:.0f}x)",
        ),
    ]
