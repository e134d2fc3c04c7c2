"""What can be given to a command: each option once, with its type, help text and default.

A dataclass here is a set of options. A command that takes one has its fields as options of its own
and gets them as one value. Loads nothing but typer, so that `atoll --help` does not wait for torch.
"""

# ruff: noqa: RUF009  (what `_option` returns is a field, which a dataclass takes as such)

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

RunFileArgument = Annotated[Path, typer.Argument(help="The run file (TOML).")]
DirectoryArgument = Annotated[Path, typer.Argument(help="The coordinator's state directory.")]
WorkerArgument = Annotated[str, typer.Argument(help="The worker's id.")]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Do it; without this only what would be done is shown.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_LOG_LEVELS = "debug, info, warning or error."


def _option(default: object, text: str, *names: str, **more: Any) -> Any:
    """A field of that default that is an option with that help text.

    Its name is the field's, or `names`. Of a flag they must be given, or typer adds a --no-flag.
    """
    return field(default=default, metadata={"typer": typer.Option(*names, help=text, **more)})


@dataclass(frozen=True, kw_only=True)
class Target:
    """The coordinator that a command asks, and how it shows the answer."""

    url: Annotated[str, typer.Argument(help="The coordinator's URL.")]
    token: str | None = _option(
        None, "The token `atoll serve` printed.", envvar="ATOLL_TOKEN", show_envvar=True
    )
    fingerprint: str | None = _option(None, "sha256:… of the coordinator's certificate, to pin.")
    insecure: bool = _option(
        False, "Send the token in plain text to another machine.", "--insecure"
    )
    as_json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class Records(Target):
    """A run's state directory, and whom to ask when a running coordinator holds it."""

    directory: DirectoryArgument
    url: str = _option("", "The running coordinator, if there is one.", show_default=False)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Records):
    """Everything that `atoll export` can be told."""

    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")]
    round_number: int | None = _option(None, "Weights after this round [newest].", "--round")
    published: bool = _option(False, "What islands hold, not the fp32 master.", "--published")
    blob: str | None = _option(None, "One blob of whole weights, where the ledger is lost.")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything that `atoll serve` can be told."""

    run_file: RunFileArgument
    directory: Path | None = _option(None, "State directory [.atoll/NAME of the run].", "--dir")
    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8760, "Control port; 0 takes a free one.")
    transfer_port: int = _option(0, "Data port; 0 takes a free one.")
    cert: Path | None = _option(None, "Certificate (PEM); else one is made.")
    key: Path | None = _option(None, "The certificate's key (PEM).")
    insecure: bool = _option(False, "Plain text on an address that is not loopback.", "--insecure")
    new_tokens: bool = _option(False, "Replace the run's tokens.", "--new-tokens")
    new_manifest: bool = _option(
        False, "Record a changed run file, from the next round on.", "--new-manifest"
    )
    stay: bool = _option(False, "Serve on after the run is over.", "--stay")
    ready_file: Path | None = _option(None, "Write address and pid here once serving (JSON).")
    ledger_lease: float = _option(
        15.0, "On PostgreSQL: seconds of silence after which another may take the ledger over."
    )
    adopt_blobs: bool = _option(
        False, "Take over [storage] blobs that belong to a moved or lost ledger.", "--adopt-blobs"
    )
    reset: bool = _option(
        False, "Drop the run in the directory, after showing it; start over.", "--reset"
    )
    keep_weights: bool = _option(
        False, "With --reset: start from the old run's weights.", "--keep-weights"
    )
    purge: bool = _option(False, "With --reset: delete the old state, do not keep it.", "--purge")
    yes: bool = _option(False, "With --reset: do not ask; needed without a terminal.", "--yes")
    log_level: str = _option("info", _LOG_LEVELS)


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Target):
    """Everything that `atoll join` can be told."""

    worker_id: str | None = _option(None, "This island's name [kept in its state directory].")
    state: Path | None = _option(None, "Where this island keeps its state.")
    data: str | None = _option(
        None, "Where this machine has the run's data files [of several: name=…;name=…]."
    )
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, …")
    model: str | None = _option(
        None, "This machine's own code of the run's model.", metavar="MODULE:FACTORY"
    )
    parallel: str = _option("ddp", "Under torchrun: ddp (copies) or fsdp2 (shards).")
    group_timeout: float | None = _option(
        None, "Under torchrun: seconds after which a silent rank is given up [120]."
    )
    listen: str | None = _option(
        None,
        "In a sharded run: where other ranks reach this one [any free port].",
        metavar="HOST:PORT",
    )
    advertise: str | None = _option(
        None,
        "In a sharded run: the address told to them, if it is another.",
        metavar="HOST[:PORT]",
    )
    bucket: str | None = _option(
        None,
        "In a gather run: the bucket of the run that this island publishes in [the only one].",
        metavar="NAME",
    )
    log_level: str = _option("info", _LOG_LEVELS)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Everything that `atoll simulate` can be told."""

    run_file: Annotated[
        Path | None, typer.Argument(help="The run file (TOML); none with --faults.")
    ] = None
    islands: int | None = _option(None, "Number of islands [2; with --faults the seed's].")
    rounds: int | None = _option(None, "Stop after this many rounds.")
    directory: Path | None = _option(None, "Keep the state here, for audit and export.", "--dir")
    faults: int | None = _option(
        None, "Simulate the faults of this seed, with a stand-in.", metavar="SEED"
    )
    seeds: str | None = _option(None, "With --faults: so many seeds from there on, or A:B.")
    strategy_name: str | None = _option(
        None,
        "With --faults: gather, sharded or an installed one, in place of diloco.",
        "--strategy",
    )
    mode_name: str | None = _option(
        None, "With --faults: this mode of diloco in place of the seed's.", "--mode"
    )
    speeds: str | None = _option(
        None, "Steps each island makes while others make one, such as 4,1 [all alike]."
    )
    latencies: str | None = _option(
        None,
        "Sharded: milliseconds between ranks, one way; 20, or rows such as 0,20;20,0 [0].",
        metavar="MATRIX",
    )
    follow: Path | None = _option(
        None, "Train what this state directory records once more, and compare the weights."
    )
    as_json: JsonOption = False
    log_level: str = _option("warning", _LOG_LEVELS)


def spread(body: Callable[..., None]) -> Callable[..., None]:
    """`body` as typer can take it: a parameter that is a dataclass here becomes its fields there.

    Typer reads a command's options from the function's signature, so the one made here says the
    fields in the place of the dataclass, and the values go back into one before `body` is called.
    """
    own = inspect.signature(body).parameters.values()
    sets: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}

    def command(**given: Any) -> None:
        for name, options in sets.items():
            given[name] = options(**{one.name: given.pop(one.name) for one in fields(options)})
        body(**given)

    parameters = [shown for parameter in own for shown in _shown(parameter)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer's
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = body.__name__, body.__doc__
    return command


def _shown(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """What typer sees of one parameter of a command: itself, or the fields of a dataclass."""
    if not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    notes = {one.name: one.metadata.get("typer") for one in fields(parameter.annotation)}
    for name, each in inspect.signature(parameter.annotation).parameters.items():  # type: ignore[arg-type]
        kind = each.annotation if notes[name] is None else Annotated[each.annotation, notes[name]]
        yield each.replace(annotation=kind)
