"""The commands and their options. Command bodies load what they need when they run, so that
`atoll --help` does not wait for torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.options import (
    DirectoryArgument,
    ExportOptions,
    JoinOptions,
    JsonOption,
    Records,
    RunFileArgument,
    ServeOptions,
    SimulateOptions,
    Target,
    WorkerArgument,
    YesOption,
    spread,
)

app = typer.Typer(
    name="atoll",
    help="Train one model on machines that share only an ordinary network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a command to `atoll`, under its own name or `name`."""
    return lambda body: app.command(name)(spread(body))


@_command()
def serve(options: ServeOptions) -> None:
    """Run a coordinator; prints the join command with its token."""
    from atoll.cli import serve as command

    output.set_up_logs(options.log_level)
    command.serve(options)


@_command()
def join(options: JoinOptions) -> None:
    """Run an island; everything else comes from the coordinator."""
    from atoll.cli import join as command

    output.set_up_logs(options.log_level)
    command.join(options)


@_command()
def simulate(options: SimulateOptions) -> None:
    """Run a coordinator and islands in one process on a virtual clock."""
    from atoll.cli import simulate as command

    output.set_up_logs(options.log_level)
    command.simulate(options)


@_command()
def status(
    target: Target,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run is over.")] = False,
) -> None:
    """Show a run: rounds, losses, islands."""
    from atoll.cli import status as command

    command.status(target, watch=watch)


@_command()
def info(target: Target) -> None:
    """Show a run's settings; they come from its run file alone."""
    from atoll.cli import info as command

    command.info(target)


@_command()
def work(target: Target) -> None:
    """Show the queues of rows: what is issued, done and open, and who has it."""
    from atoll.cli import work as command

    command.work(target)


@_command()
def workers(target: Target) -> None:
    """Show who takes part, who is late and who is kept out (admin token)."""
    from atoll.cli import control as command

    command.workers(target)


@_command()
def pause(target: Target) -> None:
    """Hand out no more rounds; the round under way is closed (admin token)."""
    from atoll.cli import control as command

    command.order(target, "pause")


@_command()
def resume(target: Target) -> None:
    """Go on after `pause` (admin token)."""
    from atoll.cli import control as command

    command.order(target, "run")


@_command()
def stop(target: Target) -> None:
    """End the run after the round under way, with a snapshot (admin token)."""
    from atoll.cli import control as command

    command.order(target, "stop")


@_command()
def kick(target: Target, worker_id: WorkerArgument) -> None:
    """Take a worker out of the run and keep it out (admin token)."""
    from atoll.cli import control as command

    command.kick(target, worker_id)


@_command()
def allow(target: Target, worker_id: WorkerArgument) -> None:
    """Let a worker in again after `kick` (admin token)."""
    from atoll.cli import control as command

    command.allow(target, worker_id)


@_command("outer-lr")
def outer_lr(
    target: Target, lr: Annotated[float, typer.Argument(help="The new outer learning rate.")]
) -> None:
    """Change the outer learning rate from a later round on (admin token)."""
    from atoll.cli import control as command

    command.outer_lr(target, lr)


@_command()
def audit(
    records: Records,
    *,
    replay: Annotated[
        bool, typer.Option("--replay", help="Rebuild the weights of every round.")
    ] = False,
) -> None:
    """Prove a run: hash chain, every contribution, every row once; exit code 1 if not."""
    from atoll.cli import audit as command

    command.audit(records, replay=replay)


@_command()
def repair(
    directory: DirectoryArgument, *, yes: YesOption = False, as_json: JsonOption = False
) -> None:
    """Show what is damaged and the last good round; with --yes go back to it, deleting nothing."""
    from atoll.cli import repair as command

    command.repair(directory, yes=yes, as_json=as_json)


@_command()
def export(options: ExportOptions) -> None:
    """Write a run's weights as a safetensors file."""
    from atoll.cli import export as command

    command.export(options)


@app.command()
def demo(
    run_file: RunFileArgument = Path("examples/quickstart.toml"),
    islands: Annotated[
        int | None, typer.Option(help="Number of islands [2, or as many as a round needs].")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the run's state goes [a fresh one].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on this machine: a coordinator and islands as processes, a table at the end."""
    from atoll.cli import demo as command

    command.demo(run_file, islands=islands, directory=directory, as_json=as_json)


@app.command()
def gradcheck(
    files: Annotated[
        list[Path], typer.Argument(help="Python files with one Topology or Loop each.")
    ],
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Break one part at a time; each break must be seen.")
    ] = False,
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="Like ci=6,layers=2x3,ppgd=2, or ranks=4; repeat it for more sizes."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="local (threads) or gloo (processes) [the file's own].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare gradients of ranks with those of one process.

    Exit code 0: right. 1: a gradient is wrong, or a mutant survived. 2: refused, with the reason.
    3: no verdict, since these sizes or counts could not show a mistake. Of several files the worst.
    """
    from atoll.cli import gradcheck as command

    command.gradcheck(files, mutants=mutants, sizes=sizes, ranks=ranks, as_json=as_json)


gather_app = typer.Typer(
    name="gather",
    help="Gather peers' sparse contributions, window by window.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(gather_app)
GatherFileArgument = Annotated[Path, typer.Argument(help="The gather file (TOML).")]


@gather_app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="Where the signing key goes; never replaced.")],
    as_json: JsonOption = False,
) -> None:
    """Make a signing key; prints its public key for the gather file."""
    from atoll.cli import gather as command

    command.keygen(path, as_json=as_json)


@gather_app.command()
def publish(
    file: GatherFileArgument,
    uid: Annotated[str, typer.Argument(help="This peer's uid.")],
    displacement: Annotated[
        Path, typer.Argument(help="Base weights minus trained ones (safetensors).")
    ],
    key: Annotated[Path, typer.Option("--key", help="This peer's signing key.")],
    samples: Annotated[str, typer.Option(help="sha256 of the rows trained on.")] = "0" * 64,
    residual: Annotated[
        Path | None,
        typer.Option(help="Error feedback: what is not sent is kept in this file [not kept]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a peer's displacement for the window that its state waits for."""
    from atoll.cli import gather as command

    command.publish(
        file,
        uid,
        displacement,
        secret=key,
        sample_digest=samples,
        residual=residual,
        as_json=as_json,
    )


@gather_app.command()
def window(
    file: GatherFileArgument,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine; or use torchrun.")] = 1,
    metrics: Annotated[
        Path | None, typer.Option(help="A file for the window's numbers, as Prometheus reads them.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    as_json: JsonOption = False,
) -> None:
    """Gather the next window: fetch, check, merge, apply, record."""
    from atoll.cli import gather as command

    output.set_up_logs(log_level)
    command.window(file, ranks=ranks, metrics=metrics, log_level=log_level, as_json=as_json)


@gather_app.command("catch-up")
def catch_up(
    file: GatherFileArgument,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine; or use torchrun.")] = 1,
    stop: Annotated[int | None, typer.Option(help="The window to wait for [the newest].")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    as_json: JsonOption = False,
) -> None:
    """Bring this machine's weights to the newest, by the artifacts."""
    from atoll.cli import gather as command

    output.set_up_logs(log_level)
    command.catch_up(file, ranks=ranks, stop=stop, log_level=log_level, as_json=as_json)


def _version(asked: bool) -> None:
    if asked:
        from atoll import __version__

        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version
