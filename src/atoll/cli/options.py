"""What can be given to a command: each option once, with its type, help text and default.

A dataclass here is a set of options. A command that takes one has its fields as options of its own
and gets them as one value. Loads nothing but typer, so that `atoll --help` does not wait for torch.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

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


@dataclass(frozen=True, kw_only=True)
class Target:
    """The coordinator that a command asks, and how it shows the answer."""

    url: UrlArgument
    token: TokenOption = None
    fingerprint: FingerprintOption = None
    as_json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class Live:
    """Whom to ask about a state directory that a running coordinator holds."""

    url: Annotated[
        str | None, typer.Option("--url", help="The running coordinator, if there is one.")
    ] = None
    token: TokenOption = None
    fingerprint: FingerprintOption = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything that `atoll serve` can be told."""

    run_file: RunFileArgument
    directory: Annotated[
        Path | None, typer.Option("--dir", help="State directory [.atoll/NAME of the run].")
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Control port; 0 takes a free one.")] = 8760
    transfer_port: Annotated[int, typer.Option(help="Data port; 0 takes a free one.")] = 0
    cert: Annotated[Path | None, typer.Option(help="Certificate (PEM); else one is made.")] = None
    key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text on an address that is not loopback.")
    ] = False
    new_tokens: Annotated[bool, typer.Option("--new-tokens", help="Replace the run's tokens.")] = (
        False
    )
    new_manifest: Annotated[
        bool,
        typer.Option("--new-manifest", help="Record a changed run file, from the next round on."),
    ] = False
    stay: Annotated[bool, typer.Option("--stay", help="Serve on after the run is over.")] = False
    ready_file: Annotated[
        Path | None, typer.Option(help="Write address and pid here once serving (JSON).")
    ] = None
    ledger_lease: Annotated[
        float,
        typer.Option(
            help="On PostgreSQL: seconds of silence after which another may take the ledger over."
        ),
    ] = 15.0
    adopt_blobs: Annotated[
        bool,
        typer.Option(
            "--adopt-blobs", help="Take over [storage] blobs that belong to a moved or lost ledger."
        ),
    ] = False
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Drop the run in the directory, after showing it; start over."
        ),
    ] = False
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="With --reset: start from the old run's weights."),
    ] = False
    purge: Annotated[
        bool, typer.Option("--purge", help="With --reset: delete the old state, do not keep it.")
    ] = False
    yes: Annotated[
        bool, typer.Option("--yes", help="With --reset: do not ask; needed without a terminal.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Everything that `atoll join` can be told."""

    url: UrlArgument
    token: TokenOption = None
    fingerprint: FingerprintOption = None
    worker_id: Annotated[
        str | None, typer.Option(help="This island's name [kept in its state directory].")
    ] = None
    state: Annotated[Path | None, typer.Option(help="Where this island keeps its state.")] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Where this machine has the run's data files [of several: name=…;name=…]."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto"
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="This machine's own code of the run's model."),
    ] = None
    parallel: Annotated[
        str, typer.Option(help="Under torchrun: ddp (copies) or fsdp2 (shards).")
    ] = "ddp"
    group_timeout: Annotated[
        float | None,
        typer.Option(help="Under torchrun: seconds after which a silent rank is given up [120]."),
    ] = None
    as_json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Everything that `atoll simulate` can be told."""

    run_file: Annotated[
        Path | None, typer.Argument(help="The run file (TOML); none with --faults.")
    ] = None
    islands: Annotated[
        int | None, typer.Option(help="Number of islands [2; with --faults the seed's].")
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds.")] = None
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep the state here, for audit and export.")
    ] = None
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults", metavar="SEED", help="Simulate the faults of this seed, with a stand-in."
        ),
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="With --faults: so many seeds from there on, or A:B."),
    ] = None
    strategy_name: Annotated[
        str | None,
        typer.Option("--strategy", help="With --faults: an installed strategy in place of diloco."),
    ] = None
    as_json: JsonOption = False


def spread(body: Callable[..., None]) -> Callable[..., None]:
    """`body` as typer can take it: a parameter that is a dataclass here becomes its fields there.

    Typer reads a command's options from the function's signature, so the one made here says the
    fields in the place of the dataclass, and the values go back into one before `body` is called.
    """
    sets: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in inspect.signature(body).parameters.values()
        if is_dataclass(parameter.annotation)
    }

    def command(**given: Any) -> None:
        for name, options in sets.items():
            own = inspect.signature(options).parameters
            given[name] = options(**{field: given.pop(field) for field in own})
        body(**given)

    parameters = list(_fields(body))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer's
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = body.__name__, body.__doc__
    return command


def _fields(body: Callable[..., None]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(body).parameters.values():
        if is_dataclass(parameter.annotation):
            yield from _fields(parameter.annotation)  # type: ignore[arg-type]  # a class is called
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
