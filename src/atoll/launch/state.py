"""A coordinator's state directory: where its ledger, blobs and secrets are, held by one process.

coordinator.lock   who holds it          blobs/    contributions, snapshots, initial weights
ledger.sqlite      the truth             spool/    frames being served; computed again at start
stores.json        ledger and blobs, where they are elsewhere
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.blobs import registry as blob_stores
from atoll.blobs.access import S3Access
from atoll.blobs.base import Blobs
from atoll.coordinator.boot import Stores
from atoll.coordinator.spool import Spool
from atoll.errors import ConfigError
from atoll.ledger import engines, lock
from atoll.ledger.base import Ledger


@dataclass(frozen=True)
class Addresses:
    """Where ledger and blobs are; None means inside the state directory."""

    ledger: str | None = None
    blobs: str | None = None


@contextmanager
def held(
    directory: Path, addresses: Addresses, *, pid: int, wall: float, s3: S3Access | None = None
) -> Iterator[Stores]:
    """Opens a state directory for a coordinator; StateHeld names a process that has it."""
    directory.mkdir(parents=True, exist_ok=True)
    with lock.hold(directory, pid=pid, wall=wall):
        (directory / "stores.json").write_text(
            json.dumps({"ledger": addresses.ledger, "blobs": addresses.blobs})
        )
        ledger = engines.open_ledger(addresses.ledger or directory / "ledger.sqlite")
        try:
            blobs = open_blobs(directory, addresses, s3=s3)
            yield Stores(ledger, blobs, Spool(directory / "spool"))
            blobs.close()
        finally:
            ledger.close()


@contextmanager
def at_rest(
    directory: Path, *, pid: int, wall: float, s3: S3Access | None = None
) -> Iterator[tuple[Ledger, Blobs]]:
    """Opens an existing state directory for reading; StateHeld while a coordinator runs on it."""
    addresses = addresses_of(directory)
    with lock.hold(directory, pid=pid, wall=wall):
        ledger = engines.open_ledger(addresses.ledger or directory / "ledger.sqlite")
        try:
            blobs = open_blobs(directory, addresses, s3=s3)
            yield ledger, blobs
            blobs.close()
        finally:
            ledger.close()


def addresses_of(directory: Path) -> Addresses:
    """Where the stores of an existing state directory are."""
    path = directory / "stores.json"
    if not path.exists():
        if (directory / "ledger.sqlite").exists():
            return Addresses()
        raise ConfigError(
            f"{str(directory)!r} is not a coordinator's state directory; "
            f"give the directory that `atoll serve --dir` used"
        )
    return Addresses(**json.loads(path.read_text()))


def open_blobs(directory: Path, addresses: Addresses, *, s3: S3Access | None = None) -> Blobs:
    """The blob store of a state directory."""
    location = addresses.blobs or str(directory / "blobs")
    return blob_stores.open_blobs(location, spool=directory / "blob-cache", s3=s3)
