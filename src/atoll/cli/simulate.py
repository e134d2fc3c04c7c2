"""`atoll simulate`: the same run in one process."""

from dataclasses import dataclass
from pathlib import Path

from atoll import config
from atoll.cli import output
from atoll.cli.status import history_table
from atoll.errors import ConfigError
from atoll.protocol.messages import Status
from atoll.simulate import cluster

DEFAULT_ISLANDS = 2


@dataclass(frozen=True)
class Faults:
    """The first seed of faults and how many; both None where no faults are asked for."""

    seed: int | None = None
    seeds: str | None = None
    strategy_name: str | None = None


def simulate(
    run_file: Path | None,
    *,
    islands: int | None,
    rounds: int | None,
    directory: Path | None,
    faults: Faults,
    as_json: bool,
) -> None:
    """Runs to the end and shows what came of it."""
    if faults.seed is not None or faults.seeds is not None:
        if directory is not None:
            raise ConfigError(
                f"--faults keeps no state, so --dir {str(directory)!r} has no effect; leave it out"
            )
        _with_faults(run_file, faults, islands=islands, rounds=rounds, as_json=as_json)
        return
    if run_file is None:
        raise ConfigError(
            "there is no run file to simulate; name one, or use --faults SEED, which needs none"
        )
    islands = DEFAULT_ISLANDS if islands is None else islands
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


def _with_faults(
    run_file: Path | None,
    asked: Faults,
    *,
    islands: int | None,
    rounds: int | None,
    as_json: bool,
) -> None:
    from atoll.cli import faults
    from atoll.simulate.faults.scenario import Size

    if run_file is not None:
        raise ConfigError(
            f"--faults simulates a stand-in model, not {str(run_file)!r}; leave the run file out"
        )
    size = Size(islands, rounds, asked.strategy_name)
    faults.faults(asked.seed or 0, seeds=asked.seeds, size=size, as_json=as_json)
