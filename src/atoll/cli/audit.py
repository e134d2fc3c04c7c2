"""`atoll audit`: the proof, of a directory at rest or of a live run."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.progress import Progress

from atoll.blobs.base import Blobs
from atoll.cli import output
from atoll.cli.link import linked
from atoll.cli.options import Records
from atoll.cli.s3 import s3_access
from atoll.errors import ConfigError, StateHeld
from atoll.launch import state
from atoll.layout import Layout
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.proof import audit as auditing
from atoll.proof.report import AuditReport
from atoll.proof.residuals import LostResidual
from atoll.protocol.manifest import Manifest
from atoll.versions import recorded


@dataclass(frozen=True)
class Opened:
    """A run's records, readable."""

    ledger: Ledger
    blobs: Blobs
    manifest: Manifest
    layout: Layout


def audit(records: Records, *, replay: bool) -> None:
    """Checks the run; exit code 1 when something does not hold."""
    with opened(records) as run, Progress(console=output.stderr, transient=True) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in ("contributions", "replay")}
        report = auditing.audit(
            run.ledger,
            run.blobs,
            layout=run.layout,
            with_replay=replay,
            progress=lambda name, done, all_: bars.update(tasks[name], completed=done, total=all_),
        )
    if records.as_json:
        output.print_json(report.as_json())
    else:
        _show(report)
    if not report.clean:
        raise typer.Exit(1)


@contextmanager
def opened(records: Records) -> Iterator[Opened]:
    """The directory's records; of a live run a consistent copy, asked of its coordinator."""
    directory, s3 = records.directory, s3_access()
    with ExitStack() as stack:
        keep = stack.enter_context
        try:
            ledger, blobs = keep(state.at_rest(directory, s3=s3))
        except StateHeld as held:
            if not records.url:
                raise StateHeld(
                    f"{held}; or give --url and the admin --token, and the coordinator is asked "
                    f"for a copy of its ledger"
                ) from held
            path = Path(keep(TemporaryDirectory(prefix="atoll-audit-"))) / "ledger.sqlite"
            with linked(records) as link, path.open("wb") as file:
                link.copy_ledger(file.write)
            addresses = state.addresses_of(directory)
            ledger = keep(closing(engines.open_ledger(path)))
            blobs = keep(closing(state.open_blobs(directory, addresses, s3=s3)))
        manifest = recorded.manifest_of(ledger)
        if manifest is None:
            raise ConfigError(f"{str(directory)!r} holds no run yet; start one with `atoll serve`")
        yield Opened(ledger, blobs, manifest, recorded.layout_of(manifest))


def _show(report: AuditReport) -> None:
    replayed = "not asked for (--replay)"
    if report.replayed_from is not None:
        snapshot = f"the snapshot of round {report.replayed_from} (older blobs are pruned)"
        origin = snapshot if report.replayed_from else "the initial weights"
        replayed = f"{report.replayed_rounds} rounds rebuilt from {origin}"
    if report.checkpoints_read is not None:
        replayed = f"weights of {report.checkpoints_read} checkpoints read and compared"
    output.say(
        f"run {report.run_id}: {report.rounds} rounds, {report.contributions} contributions "
        f"({report.pruned} pruned), {report.rows} rows, {report.tokens} tokens"
        + (f", at most {report.staleness} rounds stale" if report.staleness else "")
    )
    for epoch in report.balance:
        output.say(
            f"rows of {epoch.name or 'dataset'} {epoch.dataset_id} epoch {epoch.epoch}: "
            f"{epoch.rows} rows, {epoch.done_once} done once, {epoch.done_twice} twice, "
            f"{epoch.missing} missing ({epoch.leased} leased, {epoch.reopened} reopened, "
            f"{epoch.unissued} not issued, {epoch.given_up} given up)"
        )
    for found in report.fragments:
        output.say(
            f"rows in fragment {found.fragment}: {found.counted} counted, {found.to_come} to come, "
            f"{found.missed} missed"
        )
    for lost in report.residuals:
        output.say(_about(lost))
    output.say(f"replay: {replayed}")
    unknown = "not known without --replay: no round has carried one of the fragments yet"
    output.say(f"params digest {report.digest or unknown}")
    for problem in report.problems:
        output.say(f"PROBLEM in round {problem.round}: {problem.what}: {problem.detail}")
    output.say("clean" if report.clean else "NOT clean")


def _about(lost: LostResidual) -> str:
    """What became of a residual that no contribution took in."""
    fate = "the worker is gone with it"
    if lost.next is not None:
        instead = f"that of round {lost.carried}" if lost.carried else "none"
        fate = f"its next contribution, to round {lost.next}, carried {instead}"
    return f"residual of {lost.worker_id} after round {lost.round}, norm {lost.norm:.6g}: {fate}"
