"""`atoll repair`: shows what is damaged and how far the run holds; with --yes goes back there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from atoll.cli import output
from atoll.cli.s3 import s3_access
from atoll.errors import AtollError, BlobChanged, BlobMissing, StateDamaged, StateHeld
from atoll.launch import repair as repairing
from atoll.launch.repair_report import RepairReport

SHOWN = 20  # damages, of what may be thousands
DAMAGED = (StateDamaged, BlobMissing, BlobChanged)


def repair(directory: Path, *, yes: bool, as_json: bool) -> None:
    """Looks, or repairs; exit code 1 while something is damaged or the audit is not clean."""
    act = repairing.repair if yes else repairing.look
    report = act(directory, s3=s3_access())
    if as_json:
        output.print_json(report.as_json())
    else:
        _show(report)
    done = report.audit is not None and report.audit["clean"]
    if not (report.sound or done):
        raise typer.Exit(1)


@contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """Explains the damage that the block meets, once the block has let the directory go."""
    try:
        yield
    except DAMAGED as error:
        raise explained(directory, error) from error


def explained(directory: Path, error: AtollError) -> AtollError:
    """`error` with the last good round and the way out added, found by looking at the directory."""
    way_out = (
        f"`atoll repair {directory}` shows what is damaged and what can be kept, and with --yes "
        f"goes back to it; or restore the named file from a copy"
    )
    try:
        report = repairing.look(directory, s3=s3_access())
    except StateHeld:
        raise
    except AtollError as other:
        if str(other) == str(error):
            return error  # it says itself what to do
        return type(error)(f"{error}; looking further ended with: {other}; {way_out}")
    good = "none" if report.last_good is None else str(report.last_good)
    if report.ledger_elsewhere:
        way_out = f"`atoll repair {directory}` shows what is damaged; restore it from a copy"
    return type(error)(f"{error}; the last good round is {good}; {way_out}")


def _show(report: RepairReport) -> None:
    if report.sound:
        output.say(
            f"nothing is damaged: run {report.run_id}, {report.kept.rounds} rounds, "
            f"{report.kept.contributions} contributions; `atoll audit --replay` proves the rest"
        )
        return
    for damage in report.damages[:SHOWN]:
        output.say(f"DAMAGED {damage}")
    if len(report.damages) > SHOWN:
        output.say(f"… and {len(report.damages) - SHOWN} more (--json lists all)")
    if not report.repairable:
        _show_lost(report)
        return
    output.say(f"last good round: {report.last_good} of {report.published}")
    if report.ledger_elsewhere:
        output.say(
            "the ledger is not in the state directory, and `atoll repair` changes only one that "
            "is: restore that database or what is named above from a copy"
        )
        return
    dropped, kept = report.dropped, report.kept
    done = report.audit is not None
    output.say(
        f"{'kept' if done else 'stays'}: {kept.rounds} rounds, {kept.contributions} contributions, "
        f"{kept.rows} rows, {kept.tokens} tokens"
        + ("; the round after the last good one as it stands" if report.keeps_open else "")
    )
    output.say(
        f"{'dropped' if done else 'would be dropped'}: {dropped.rounds} rounds, "
        f"{dropped.contributions} contributions, {dropped.tokens} tokens; "
        f"{dropped.rows} rows become open again"
    )
    if report.dropped_snapshots:
        listed = ", ".join(map(str, report.dropped_snapshots))
        output.say(f"snapshots that go: of versions {listed}; weights are replayed instead")
    if report.replay_from:
        output.say(f"audit replays from version {report.replay_from} on: older blobs are damaged")
    if report.audit is None:
        output.say(
            f"nothing has been changed; `atoll repair {report.directory} --yes` does this and "
            f"moves the old ledger and {len(report.put_aside)} blobs to a damaged-N directory in it"
        )
        return
    output.say(f"the old ledger and {len(report.put_aside)} blobs are in {report.aside!r}")
    output.say(f"audit with replay: {'clean' if report.audit['clean'] else 'NOT clean'}")
    output.say("islands register again by themselves once `atoll serve` runs")


def _show_lost(report: RepairReport) -> None:
    output.say("no round can be rebuilt from what is left: restore the directory from a copy")
    whole = [item for item in report.weights if item["kind"] == "weights"]
    for item in whole:
        output.say(f"blob {item['blob']} holds the weights of version {item['version']}")
    if whole:
        output.say(
            "such a blob can still be written as safetensors: "
            f"atoll export {report.directory} --blob {whole[-1]['blob'][:16]} "
            f"-o model.safetensors; a new run starts from it with `[model] start_from`"
        )
