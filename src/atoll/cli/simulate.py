"""`atoll simulate`: the same run in one process."""

from pathlib import Path

from atoll import config
from atoll.cli import output
from atoll.cli.status import history_table
from atoll.protocol.messages import Status
from atoll.simulate import cluster


def simulate(
    run_file: Path, *, islands: int, rounds: int | None, directory: Path | None, as_json: bool
) -> None:
    """Runs to the end and shows what came of it."""
    loaded = config.load(run_file)

    def progress(status: Status) -> None:
        if not as_json:
            newest = status.history[-1]
            output.say(
                f"round {newest.round}: train loss {output.number(newest.train_loss)}, "
                f"held-out loss {output.number(newest.evaluation_loss) or '-'}"
            )

    result = cluster.simulate(
        loaded,
        islands=islands,
        rounds=rounds,
        location=loaded.data_location,
        directory=directory,
        progress=progress,
    )
    if as_json:
        output.print_json(
            {
                "digest": result.digest,
                "published_digest": result.published_digest,
                "virtual_seconds": result.virtual_seconds,
                "islands": islands,
                "status": result.status.model_dump(mode="json"),
            }
        )
        return
    output.console.print(history_table(result.status))
    output.say(
        f"{result.status.version} rounds in {result.virtual_seconds:.1f} virtual seconds; "
        f"params digest {result.digest}"
    )
