"""Starting over: a run's state is put aside whole, and its directory is free for a new run.

The old state becomes the sibling `DIR.dropped-N`. Tokens and certificate belong to the coordinator,
not to the run, and stay; the weights stay when they are asked for.
"""

import itertools
import os
import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from atoll import files as filesystem
from atoll.errors import AtollError, ConfigError, StateDamaged
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.sqlite import lock, salvage
from atoll.ledger.sqlite.salvage import Counts
from atoll.proof import export
from atoll.versions import recorded

CERTIFICATE_FILES = ("certificate.pem", "certificate.key")
_NO_RUN = {lock.FILE_NAME, *CERTIFICATE_FILES}  # all there is of a start that made no run
WEIGHTS_FILE = "kept-weights.safetensors"


@dataclass(frozen=True)
class Old:
    """What a state directory holds before it is dropped."""

    directory: Path
    nbytes: int
    run_id: str | None = None
    counts: Counts = field(default_factory=Counts)
    credentials: dict[str, str] = field(default_factory=dict)
    unreadable: str | None = None  # why nothing more is known
    weights: Path | None = None  # a file of the newest weights, once it is written


def look(directory: Path, addresses: Addresses, *, keep_weights: bool = False) -> Old | None:
    """What would be dropped, or None; with `keep_weights` also exports the newest weights to it.

    StateHeld names a process that has the directory. ConfigError for a directory that is not a
    run's, and for stores that are elsewhere: nobody can move those aside.
    """
    if not directory.is_dir() or {path.name for path in directory.iterdir()} <= _NO_RUN:
        if keep_weights:
            raise _no_weights(directory)
        return None
    if directory.name in ("", ".."):
        rule = "a process cannot move where it stands; give its whole path from outside it"
        raise ConfigError(f"--reset moves the directory {str(directory)!r} aside, and {rule}")
    if {addresses, _recorded(directory)} != {Addresses()}:
        raise ConfigError(
            "--reset puts a state directory aside, and this run keeps its ledger or blobs "
            "elsewhere (storage.ledger, storage.blobs); start over with another database or prefix "
            "and another --dir"
        )
    with closing(lock.hold(directory)):
        nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        try:
            return _read(directory, nbytes, keep_weights=keep_weights)
        except AtollError as error:
            if keep_weights:
                raise
            return Old(directory, nbytes, unreadable=str(error))


def _no_weights(directory: Path) -> ConfigError:
    return ConfigError(
        f"--keep-weights: {str(directory)!r} holds no run, so there are no weights to keep; those "
        f"of a reset that was cut off are in {WEIGHTS_FILE} of the newest "
        f"{directory.name}.dropped-N beside it: give that file as [model] start_from"
    )


def _recorded(directory: Path) -> Addresses:
    """Where the run in the directory keeps its stores, whatever the run file says now."""
    try:
        return state.addresses_of(directory)
    except StateDamaged:
        return Addresses()  # what cannot be read is put aside like the rest


def _read(directory: Path, nbytes: int, *, keep_weights: bool) -> Old:
    state.check_repaired(directory)
    with closing(engines.open_ledger(directory / "ledger.sqlite")) as ledger:
        with ledger.reading() as t:
            run, counts, credentials = t.run.get(), salvage.counts(t), t.credentials.all()
        if keep_weights and run is None:
            raise _no_weights(directory)
        weights = _export(directory, ledger) if keep_weights else None
        run_id = None if run is None else run.run_id
        return Old(directory, nbytes, run_id, counts, credentials, weights=weights)


def _export(directory: Path, ledger: Ledger) -> Path:
    manifest = recorded.manifest_of(ledger)
    assert manifest is not None
    path = directory / WEIGHTS_FILE
    with closing(state.open_blobs(directory, Addresses())) as blobs:
        export.export(ledger, blobs, path, layout=recorded.layout_of(manifest))
    return path


def put_aside(directory: Path) -> Path:
    """Moves the directory to its sibling `DIR.dropped-N` and makes an empty one with its keys.

    A symbolic link stays and the directory that it leads to is moved, so that the new run is on the
    same disk. StoreError for a directory that cannot be moved, such as a mount point.
    """
    directory = directory.resolve()
    named = (directory.with_name(f"{directory.name}.dropped-{n}") for n in itertools.count(1))
    target = next(path for path in named if not path.exists())
    with filesystem.naming("put aside", directory), closing(lock.hold(directory)):
        os.replace(directory, target)
        # Or a crash might leave the new directory and the old one nowhere.
        filesystem.sync(directory.parent)
        directory.mkdir(mode=0o700)
        for name in CERTIFICATE_FILES:
            if (target / name).exists():
                shutil.copy2(target / name, directory / name)
                filesystem.sync(directory / name)
        filesystem.sync(directory)
        filesystem.sync(directory.parent)
    return target
