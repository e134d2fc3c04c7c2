"""`atoll gather …`: reads the file, runs the step, shows what became of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.cli import output
from atoll.cli.s3 import s3_access
from atoll.clock import Clock, SystemClock
from atoll.collectives.base import Collectives
from atoll.gather.keys import SecretKey
from atoll.gather.numbers import Numbers
from atoll.launch import gather as launching
from atoll.launch import gather_file, gather_metrics, gather_publish, placement
from atoll.launch.gather_file import GatherFile
from atoll.versions import weights_file


def keygen(path: Path, *, as_json: bool) -> None:
    """Makes a key and shows its public part."""
    key = SecretKey.make()
    key.save(path)
    told = {"path": str(path), "public_key": key.public.hex}
    _show(told, f"wrote {str(path)!r}; its public key is {key.public.hex}", as_json=as_json)


def publish(
    file: Path,
    uid: str,
    displacement: Path,
    *,
    secret: Path,
    sample_digest: str,
    residual: Path | None,
    as_json: bool,
) -> None:
    """Publishes a displacement and shows the statement."""
    told = gather_publish.publish(
        gather_file.load(file),
        uid,
        displacement,
        secret=secret,
        sample_digest=sample_digest,
        clock=SystemClock(),
        s3=s3_access(),
        residual=residual,
    )
    size = output.size(told["nbytes"])
    _show(told, f"published {size} of {uid!r} for window {told['window']}", as_json=as_json)


def window(file: Path, *, ranks: int, metrics: Path | None, log_level: str, as_json: bool) -> None:
    """Gathers the next window; rank 0 shows it."""
    if metrics is not None:
        weights_file.check_target(metrics, option="--metrics ")
    words = ["--log-level", log_level]
    words += [] if metrics is None else ["--metrics", str(metrics)]
    _spawned(ranks, "window", file, *words, as_json=as_json)

    def told(found: Numbers) -> None:
        if metrics is not None:
            gather_metrics.write(metrics, found)

    with _ranks(file) as (found, group, clock):
        shown = launching.window(found, group, clock=clock, s3=s3_access(), told=told)
        if group.rank == 0:
            _show(
                shown,
                f"window {shown['window']}: applied {len(shown['uids'])}, skipped "
                f"{len(shown['skipped'])}, digest {shown['digest']}",
                as_json=as_json,
            )


def catch_up(file: Path, *, ranks: int, stop: int | None, log_level: str, as_json: bool) -> None:
    """Catches up; rank 0 shows how far."""
    words = ["--log-level", log_level]
    words += [] if stop is None else ["--stop", str(stop)]
    _spawned(ranks, "catch-up", file, *words, as_json=as_json)
    with _ranks(file) as (found, group, clock):
        told = launching.catch_up(found, group, stop=stop, clock=clock, s3=s3_access())
        if group.rank == 0:
            _show(
                told,
                f"caught up from window {told['first']} to {told['stop']} by "
                f"{output.size(told['bytes'])}, digest {told['digest']}",
                as_json=as_json,
            )


def _spawned(ranks: int, command: str, file: Path, *words: str, as_json: bool) -> None:
    """Where more ranks than this process are asked for, they do it, and this process ends."""
    if ranks != 1 and placement.local_rank() is None:
        json = ["--json"] if as_json else []
        sys.exit(launching.spawn(ranks, ["gather", command, str(file), *words, *json]))


@contextmanager
def _ranks(file: Path) -> Iterator[tuple[GatherFile, Collectives, Clock]]:
    clock, found = SystemClock(), gather_file.load(file)
    # A rank that waits for others waits for all that they may fetch, and for what follows.
    with launching.ranks_of(found.table.seconds + launching.RANK_SECONDS, clock) as group:
        yield found, group, clock


def _show(told: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        output.print_json(told)
    else:
        output.say(sentence)
