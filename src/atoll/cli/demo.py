"""`atoll demo`: a coordinator and islands as real processes of this machine, watched to the end."""

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll import config
from atoll.blobs.access import S3Access
from atoll.cli import audit as auditing
from atoll.cli import output
from atoll.cli.join import RANK_FIGURES
from atoll.cli.options import Records
from atoll.client.http import HttpClient
from atoll.clock import SystemClock
from atoll.data import base as data
from atoll.data import registry as datasets
from atoll.errors import AtollError, ConfigError, CoordinatorUnreachable
from atoll.launch import local, seaweed
from atoll.launch.local import LocalCoordinator, LocalIsland, Tokens
from atoll.proof import audit, losses
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Status, StatusRequest, Telemetry
from atoll.simulate.cluster import worker_name
from atoll.strategies import registry

DEFAULT_ISLANDS = 2
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
    islands_agree: bool  # whether all ended in the same published weights
    bucket_bytes_sent: int  # of a gather run: into buckets, by all islands
    bucket_bytes_received: int
    gathered_versions: int  # of a gather run: that islands made of contributions themselves
    skips: dict[str, int]  # of a gather run: contributions that rounds did without, by reason


def demo(run_file: Path, *, islands: int | None, directory: Path | None, as_json: bool) -> None:
    """Trains, audits, and ends in a table; exit code 1 when anything does not hold."""
    islands = _number(run_file, islands)
    # A demo that is told to end takes its processes along, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        home = directory or Path(stack.enter_context(TemporaryDirectory(prefix="atoll-demo-")))
        clock = SystemClock()
        began = clock.now()
        tokens = Tokens(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        variables = _s3_server(run_file, home, stack)
        coordinator = local.start_coordinator(
            run_file, home, tokens=tokens, options=["--stay"], variables=variables
        )
        stack.callback(coordinator.kill)
        output.stderr.print(f"coordinator starts; state and logs in {str(home)!r}")
        coordinator.wait_ready()
        started: list[LocalIsland] = []
        for name in map(worker_name, range(islands)):
            place = home / "islands" / name
            island = local.start_island(
                coordinator.url, place, worker_id=name, tokens=tokens, variables=variables
            )
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
    if not summary.audit_clean or not summary.islands_agree:
        raise typer.Exit(1)


def _number(run_file: Path, islands: int | None) -> int:
    """How many islands; refuses a run file that cannot be read, and too few for a round."""
    membership = config.load(run_file).settings.get("membership", {})
    needed = max(1, membership.get("min_workers", 1))
    if islands is None:
        return int(max(DEFAULT_ISLANDS, needed))
    if islands < needed:
        raise ConfigError(
            f"--islands {islands} is below membership.min_workers={needed}; start at least {needed}"
        )
    return islands


def _s3_server(run_file: Path, home: Path, stack: ExitStack) -> dict[str, str]:
    """Starts a server for buckets that lie on none of their own; how processes find it."""
    places = config.load(run_file).settings.get("gather", {}).get("buckets", {}).values()
    names = [
        place["url"].removeprefix("s3://")
        for place in places
        if place["url"].startswith("s3://") and not place.get("endpoint")
    ]
    if not names:
        return {}
    s3 = S3Access(access_key_id="atoll", secret_access_key=secrets.token_hex(16))
    output.stderr.print("S3 server starts")

    def started(pid: int) -> None:
        stack.callback(_kill, pid)

    url = seaweed.start(home / "s3", names[0], s3, started=started)
    return {
        "AWS_ACCESS_KEY_ID": s3.access_key_id,
        "AWS_SECRET_ACCESS_KEY": s3.secret_access_key,
        "AWS_ENDPOINT_URL": url,
    }


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
            skips = t.skips.by_reason()
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
        islands_agree=by_step or _agree(run.manifest, report.digest, results),
        bucket_bytes_sent=_total(results, "bucket_bytes_sent"),
        bucket_bytes_received=_total(results, "bucket_bytes_received"),
        gathered_versions=_total(results, "gathered_versions"),
        skips=skips,
    )


def _agree(manifest: Manifest, digest: str | None, results: list[dict[str, Any]]) -> bool:
    """Whether all islands ended in one digest, the run's where it publishes its own weights."""
    found = {str(result["digest"]) for result in results}
    return len(found) == 1 and (manifest.download.codec != "fp32" or found == {digest})


def _total(results: list[dict[str, Any]], name: str) -> int:
    """Of all islands; 0 in a run whose islands tell no such thing."""
    return sum(result.get(name, 0) for result in results)


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
        *([] if summary.islands_agree else [("islands", "NOT of one digest; see their logs")]),
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
        *_buckets(summary),
        ("sent by islands", output.size(summary.bytes_sent)),
        ("received by islands", output.size(summary.bytes_received)),
        (
            "all-reduce every step would send",
            f"{output.size(summary.all_reduce_bytes)} ({saved:.0f}x)",
        ),
    ]


def _buckets(summary: Summary) -> list[tuple[str, str | None]]:
    """What went through buckets, which is a part of what islands sent and received."""
    if not summary.bucket_bytes_sent:
        return []
    left_out = ", ".join(f"{reason} {count}" for reason, count in summary.skips.items())
    return [
        ("published into buckets", output.size(summary.bucket_bytes_sent)),
        ("gathered from buckets", output.size(summary.bucket_bytes_received)),
        ("versions made by islands", str(summary.gathered_versions)),
        ("contributions skipped", left_out or "none"),
    ]
