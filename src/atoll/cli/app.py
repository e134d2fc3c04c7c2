"""The commands and their options. Command bodies load what they need when they run, so that
`atoll --help` does not wait for torch.
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="atoll",
    help="Train one model on machines that share only an ordinary network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunFileArgument = Annotated[Path, typer.Argument(help="The run file (TOML).")]
DirectoryArgument = Annotated[Path, typer.Argument(help="The coordinator's state directory.")]
UrlArgument = Annotated[str, typer.Argument(help="The coordinator's URL.")]
WorkerArgument = Annotated[str, typer.Argument(help="The worker's id.")]
TokenOption = Annotated[
    str | None,
    typer.Option(help="The token `atoll serve` printed.", envvar="ATOLL_TOKEN", show_envvar=True),
]
FingerprintOption = Annotated[
    str | None, typer.Option(help="sha256:… of the coordinator's certificate, to pin.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LogOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
LiveUrlOption = Annotated[
    str | None, typer.Option("--url", help="The running coordinator, if there is one.")
]


@app.command()
def serve(
    run_file: RunFileArgument,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="State directory [.atoll/NAME of the run].")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Control port; 0 takes a free one.")] = 8760,
    transfer_port: Annotated[int, typer.Option(help="Data port; 0 takes a free one.")] = 0,
    cert: Annotated[Path | None, typer.Option(help="Certificate (PEM); else one is made.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text on an address that is not loopback.")
    ] = False,
    new_tokens: Annotated[
        bool, typer.Option("--new-tokens", help="Replace the run's tokens.")
    ] = False,
    new_manifest: Annotated[
        bool,
        typer.Option("--new-manifest", help="Record a changed run file, from the next round on."),
    ] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Serve on after the run is over.")] = False,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write address and pid here once serving (JSON).")
    ] = None,
    ledger_lease: Annotated[
        float,
        typer.Option(
            help="On PostgreSQL: seconds of silence after which another may take the ledger over."
        ),
    ] = 15.0,
    adopt_blobs: Annotated[
        bool,
        typer.Option(
            "--adopt-blobs", help="Take over [storage] blobs that belong to a moved or lost ledger."
        ),
    ] = False,
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Drop the run in the directory, after showing it; start over."
        ),
    ] = False,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="With --reset: start from the old run's weights."),
    ] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="With --reset: delete the old state, do not keep it.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --reset: do not ask; needed without a terminal.")
    ] = False,
    log_level: LogOption = "info",
) -> None:
    """Run a coordinator; prints the join command with its token."""
    from atoll.cli import serve as command
    from atoll.cli.output import set_up_logs

    set_up_logs(log_level)
    command.serve(
        command.ServeOptions(
            run_file=run_file,
            directory=directory,
            host=host,
            port=port,
            transfer_port=transfer_port,
            cert=cert,
            key=key,
            insecure=insecure,
            new_tokens=new_tokens,
            new_manifest=new_manifest,
            stay=stay,
            ready_file=ready_file,
            ledger_lease=ledger_lease,
            adopt_blobs=adopt_blobs,
            reset=reset,
            keep_weights=keep_weights,
            purge=purge,
            yes=yes,
        )
    )


@app.command()
def join(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    worker_id: Annotated[
        str | None, typer.Option(help="This island's name [kept in its state directory].")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Where this island keeps its state.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Where this machine has the run's data files [of several: name=…;name=…]."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="This machine's own code of the run's model."),
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="Under torchrun: ddp (copies) or fsdp2 (shards).")
    ] = "ddp",
    group_timeout: Annotated[
        float | None,
        typer.Option(help="Under torchrun: seconds after which a silent rank is given up [120]."),
    ] = None,
    as_json: JsonOption = False,
    log_level: LogOption = "info",
) -> None:
    """Run an island; everything else comes from the coordinator."""
    from atoll.cli import join as command
    from atoll.cli.output import set_up_logs

    set_up_logs(log_level)
    command.join(
        command.JoinOptions(
            url=url,
            token=token,
            fingerprint=fingerprint,
            worker_id=worker_id,
            state=state,
            data=data,
            device=device,
            model=model,
            parallel=parallel,
            group_timeout=group_timeout,
            as_json=as_json,
        )
    )


@app.command()
def simulate(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file (TOML); none with --faults.")
    ] = None,
    islands: Annotated[
        int | None, typer.Option(help="Number of islands [2; with --faults the seed's].")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep the state here, for audit and export.")
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults", metavar="SEED", help="Simulate the faults of this seed, with a stand-in."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="With --faults: so many seeds from there on, or A:B."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", help="With --faults: an installed strategy in place of diloco."),
    ] = None,
    as_json: JsonOption = False,
    log_level: LogOption = "warning",
) -> None:
    """Run a coordinator and islands in one process on a virtual clock."""
    from atoll.cli import simulate as command
    from atoll.cli.output import set_up_logs

    set_up_logs(log_level)
    command.simulate(
        run_file,
        islands=islands,
        rounds=rounds,
        directory=directory,
        faults=command.Faults(faults, seeds, strategy),
        as_json=as_json,
    )


@app.command()
def status(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run: rounds, losses, islands."""
    from atoll.cli import status as command

    command.status(url, token=token, fingerprint=fingerprint, watch=watch, as_json=as_json)


@app.command()
def info(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run's settings; they come from its run file alone."""
    from atoll.cli import info as command

    command.info(url, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def work(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the queues of rows: what is issued, done and open, and who has it."""
    from atoll.cli import work as command

    command.work(url, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def workers(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who takes part, who is late and who is kept out (admin token)."""
    from atoll.cli import control as command

    command.workers(url, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def pause(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hand out no more rounds; the round under way is closed (admin token)."""
    from atoll.cli import control as command

    command.order(url, "pause", token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def resume(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on after `pause` (admin token)."""
    from atoll.cli import control as command

    command.order(url, "run", token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def stop(
    url: UrlArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the run after the round under way, with a snapshot (admin token)."""
    from atoll.cli import control as command

    command.order(url, "stop", token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def kick(
    url: UrlArgument,
    worker_id: WorkerArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker out of the run and keep it out (admin token)."""
    from atoll.cli import control as command

    command.kick(url, worker_id, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def allow(
    url: UrlArgument,
    worker_id: WorkerArgument,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker in again after `kick` (admin token)."""
    from atoll.cli import control as command

    command.allow(url, worker_id, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command("outer-lr")
def outer_lr(
    url: UrlArgument,
    lr: Annotated[float, typer.Argument(help="The new outer learning rate.")],
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the outer learning rate from a later round on (admin token)."""
    from atoll.cli import control as command

    command.outer_lr(url, lr, token=token, fingerprint=fingerprint, as_json=as_json)


@app.command()
def audit(
    directory: DirectoryArgument,
    replay: Annotated[
        bool, typer.Option("--replay", help="Rebuild the weights of every round.")
    ] = False,
    url: LiveUrlOption = None,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove a run: hash chain, every contribution, every row once; exit code 1 if not."""
    from atoll.cli import audit as command

    command.audit(
        directory, replay=replay, live=command.Live(url, token, fingerprint), as_json=as_json
    )


@app.command()
def repair(
    directory: DirectoryArgument,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this only what would be done is shown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is damaged and the last good round; with --yes go back to it, deleting nothing."""
    from atoll.cli import repair as command

    command.repair(directory, yes=yes, as_json=as_json)


@app.command()
def export(
    directory: DirectoryArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    round_number: Annotated[
        int | None, typer.Option("--round", help="Weights after this round [newest].")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="What islands hold, not the fp32 master.")
    ] = False,
    blob: Annotated[
        str | None, typer.Option(help="One blob of whole weights, where the ledger is lost.")
    ] = None,
    url: LiveUrlOption = None,
    token: TokenOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's weights as a safetensors file."""
    from atoll.cli import audit as audited
    from atoll.cli import export as command

    command.export(
        directory,
        output,
        round_number=round_number,
        published=published,
        blob=blob,
        live=audited.Live(url, token, fingerprint),
        as_json=as_json,
    )


@app.command()
def demo(
    run_file: RunFileArgument = Path("examples/quickstart.toml"),
    islands: Annotated[int, typer.Option(help="Number of islands.")] = 2,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the run's state goes [a fresh one].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on this machine: a coordinator and islands as processes, a table at the end."""
    from atoll.cli import demo as command

    command.demo(run_file, islands=islands, directory=directory, as_json=as_json)


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
