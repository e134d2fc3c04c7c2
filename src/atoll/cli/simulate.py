"""`atoll simulate`: the same run in one process."""

import math
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from atoll import config
from atoll.cli import output
from atoll.cli.options import SimulateOptions
from atoll.cli.s3 import s3_access
from atoll.cli.status import history_table
from atoll.errors import ConfigError
from atoll.launch import state
from atoll.protocol.messages import Status
from atoll.simulate import cluster, follow

DEFAULT_ISLANDS = 2


def simulate(options: SimulateOptions) -> None:
    """Runs to the end and shows what came of it."""
    if options.faults is not None or options.seeds is not None:
        from atoll.cli import faults

        faults.faults(options)
        return
    if options.run_file is None:
        raise ConfigError("there is no run file to simulate; name one, or use --faults SEED")
    loaded = config.load(options.run_file)
    if options.follow is not None:
        _follow(options, options.follow, loaded.data_location)
        return
    speeds = _speeds(options.speeds)
    islands = options.islands or (len(speeds) if speeds else DEFAULT_ISLANDS)

    def progress(status: Status) -> None:
        if not options.as_json:
            newest = status.history[-1]
            output.say(
                f"round {newest.round}: train loss {output.number(newest.train_loss)}, "
                f"held-out loss {output.number(newest.evaluation_loss) or '-'}"
            )

    result = cluster.simulate(
        loaded,
        islands=islands,
        rounds=options.rounds,
        location=loaded.data_location,
        directory=options.directory,
        progress=progress,
        speeds=speeds,
        latencies=_latencies(options.latencies, islands),
    )
    if options.as_json:
        status = result.status.model_dump(mode="json")
        output.print_json({**asdict(result), "islands": islands, "status": status})
        return
    output.console.print(history_table(result.status))
    output.say(
        f"{result.status.version} rounds in {result.virtual_seconds:.1f} virtual seconds; "
        f"params digest {result.digest}"
    )


def _speeds(text: str | None) -> list[float]:
    """Of each island, in turn."""
    try:
        found = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        found = [math.nan]
    if not all(0 < speed < math.inf for speed in found):
        raise ConfigError(
            f"--speeds {text!r} is no list of positive numbers; write 4,1 where the first island "
            f"makes four steps while the second makes one"
        )
    return found


def _latencies(text: str | None, islands: int) -> list[list[float]]:
    """Seconds from each rank to each other one, of milliseconds that are one for all or a row each.

    The way of a rank to itself takes no time.
    """
    if text is None:
        return []
    try:
        rows = [[float(part) for part in row.split(",")] for row in text.split(";")]
    except ValueError:
        rows = [[math.nan]]
    if len(rows) == len(rows[0]) == 1:
        rows = [rows[0] * islands] * islands
    are_right = len(rows) == islands and all(len(row) == islands for row in rows)
    if not are_right or not all(0 <= ms < math.inf for row in rows for ms in row):
        raise ConfigError(
            f"--latencies {text!r} is neither one number of milliseconds nor {islands} rows of "
            f"{islands}; write 20, or 0,20;20,0 for two ranks"
        )
    return [[0.0 if a == b else ms / 1000 for b, ms in enumerate(r)] for a, r in enumerate(rows)]


def _follow(options: SimulateOptions, directory: Path, location: str | None) -> None:
    """Trains a recorded run once more; exit code 1 when the weights are not the run's."""
    with (
        state.at_rest(directory, s3=s3_access()) as (ledger, blobs),
        TemporaryDirectory(prefix="atoll-follow-") as home,
    ):
        found = follow.follow(ledger, blobs, Path(home), location=location)
    if options.as_json:
        output.print_json({**asdict(found), "agrees": found.agrees})
    else:
        output.say(
            f"{found.contributions} contributions of {found.rounds} rounds trained once more: "
            f"params digest {found.digest}, "
            + ("as recorded" if found.agrees else f"but {found.recorded_digest} is recorded")
        )
    if not found.agrees:
        raise typer.Exit(1)
