"""`atoll serve --reset`: shows what is dropped, asks, and leaves an empty state directory."""

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from atoll.cli import output, stopping
from atoll.cli.options import ServeOptions
from atoll.config import RunFile
from atoll.errors import ConfigError
from atoll.launch import reset as resetting
from atoll.launch.reset import Old
from atoll.launch.state import Addresses
from atoll.ledger.ledger import Ledger


@dataclass(frozen=True)
class Fresh:
    """What a new run takes over from the one that was dropped."""

    run_file: RunFile
    credentials: dict[str, str] = field(default_factory=dict)
    dropped: Path | None = None

    def settle(self, ledger: Ledger, *, purge: bool) -> None:
        """Gives the recorded new run the old tokens; with `purge` deletes the old state."""
        with ledger.writing() as t:
            t.credentials.set(self.credentials)
        if purge and self.dropped is not None:
            shutil.rmtree(self.dropped)
            output.say(f"deleted {str(self.dropped)!r}")


def reset(directory: Path, run_file: RunFile, options: ServeOptions) -> Fresh:
    """Shows the old state, asks, and moves it aside; returns what the new run starts with."""
    addresses = Addresses(run_file.ledger, run_file.blobs)
    keep_weights = options.keep_weights
    old = resetting.look(directory, addresses, keep_weights=keep_weights)
    if old is None:
        output.say(f"{str(directory)!r} holds nothing to drop")
        return Fresh(run_file)
    _show(old, purge=options.purge)
    if not options.yes:
        _confirm(directory)
    with stopping.EARLY.held_back():
        target = resetting.put_aside(directory)
        output.say(f"the old state is in {str(target)!r}")
    if old.weights is not None:
        run_file = replace(run_file, start_from=target / old.weights.name)
    return Fresh(run_file, old.credentials, target)


def _show(old: Old, *, purge: bool) -> None:
    held = f"{str(old.directory)!r} holds {output.size(old.nbytes)}"
    if old.unreadable is not None:
        output.say(f"{held} that cannot be read ({old.unreadable})")
    else:
        counts = old.counts
        output.say(
            f"{held}: run {old.run_id}, {counts.rounds} rounds, {counts.contributions} "
            f"contributions, {counts.rows} rows done, {counts.tokens} tokens"
        )
    weights = "its newest weights" if old.weights is not None else "the run file's weights"
    output.say(
        f"a new run starts from {weights}, with no round, no momentum and every row open; "
        f"the old state is {'DELETED' if purge else 'moved aside'}"
    )


def _confirm(directory: Path) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"--reset drops the run in {str(directory)!r} and nobody is here to confirm; add --yes"
        )
    if not typer.confirm("Drop it and start over?"):
        raise ConfigError("not confirmed; nothing was changed")
