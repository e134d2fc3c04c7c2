"""`atoll simulate`: the same run in one process."""

from dataclasses import asdict

from atoll import config
from atoll.cli import output
from atoll.cli.options import SimulateOptions
from atoll.cli.status import history_table
from atoll.errors import ConfigError
from atoll.protocol.messages import Status
from atoll.simulate import cluster

DEFAULT_ISLANDS = 2


def simulate(options: SimulateOptions) -> None:
    """Runs to the end and shows what came of it."""
    if options.faults is not None or options.seeds is not None:
        from atoll.cli import faults

        faults.faults(options)
        return
    if options.run_file is None:
        raise ConfigError("there is no run file to simulate; name one, or use --faults SEED")
    islands = DEFAULT_ISLANDS if options.islands is None else options.islands
    loaded = config.load(options.run_file)

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
