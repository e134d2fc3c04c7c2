"""`atoll gather …`: reads the file, runs the step, shows what became of it."""

import sys
from pathlib import Path
from typing import Any

from atoll.cli import output
from atoll.cli.s3 import s3_access
from atoll.clock import SystemClock
from atoll.gather.keys import SecretKey
from atoll.launch import gather as launching
from atoll.launch import gather_file, placement


def keygen(path: Path, *, as_json: bool) -> None:
    """Makes a key and shows its public part."""
    key = SecretKey.make()
    key.save(path)
    told = {"path": str(path), "public_key": key.public.hex}
    _show(told, f"wrote {str(path)!r}; its public key is {key.public.hex}", as_json=as_json)


def publish(
    file: Path, uid: str, displacement: Path, *, secret: Path, sample_digest: str, as_json: bool
) -> None:
    """Publishes a displacement and shows the statement."""
    told = launching.publish(
        gather_file.load(file),
        uid,
        displacement,
        secret=secret,
        sample_digest=sample_digest,
        clock=SystemClock(),
        s3=s3_access(),
    )
    size = output.size(told["nbytes"])
    _show(told, f"published {size} of {uid!r} for window {told['window']}", as_json=as_json)


def window(file: Path, *, ranks: int, log_level: str, as_json: bool) -> None:
    """Gathers the next window; rank 0 shows it."""
    if ranks != 1 and placement.local_rank() is None:
        json = ["--json"] if as_json else []
        words = ["gather", "window", str(file), "--log-level", log_level, *json]
        sys.exit(launching.spawn(ranks, words))
    clock, found = SystemClock(), gather_file.load(file)
    # A rank that waits for others waits for all that they may fetch, and for what follows.
    with launching.ranks_of(found.table.seconds + 60.0, clock) as group:
        told = launching.window(found, group, clock=clock, s3=s3_access())
        if group.rank == 0:
            _show(
                told,
                f"window {told['window']}: applied {len(told['uids'])}, skipped "
                f"{len(told['skipped'])}, digest {told['digest']}",
                as_json=as_json,
            )


def catch_up(file: Path, *, stop: int | None, as_json: bool) -> None:
    """Catches up and shows how far."""
    told = launching.catch_up(
        gather_file.load(file), stop=stop, clock=SystemClock(), s3=s3_access()
    )
    _show(
        told,
        f"caught up from window {told['first']} to {told['stop']} by "
        f"{output.size(told['bytes'])}, digest {told['digest']}",
        as_json=as_json,
    )


def _show(told: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        output.print_json(told)
    else:
        output.say(sentence)
