"""A coordinator's state directory: where its ledger, blobs and secrets are, held by one process.

coordinator.lock   who holds it          blobs/    contributions, snapshots, initial weights
ledger.sqlite      the truth             spool/    frames being served; computed again at start
telemetry.sqlite   what islands measured  stores.json    ledger and blobs, where they are elsewhere
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import owner
from atoll.blobs import registry as blob_stores
from atoll.blobs.access import S3Access
from atoll.blobs.base import Blobs
from atoll.blobs.fenced import FencedBlobs
from atoll.blobs.owner import Ownership
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.shown.samples import SampleStore
from atoll.coordinator.stores import Stores
from atoll.errors import ConfigError, StateDamaged
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.postgres.epochs import LEASE_SECONDS
from atoll.ledger.sqlite import lock

STORES_FILE = "stores.json"
REPAIR_FILE = "repair.json"  # while a repair changes the directory


@dataclass(frozen=True)
class Addresses:
    """Where ledger and blobs are; None means inside the state directory."""

    ledger: str | None = None
    blobs: str | None = None


@contextmanager
def held(
    directory: Path,
    addresses: Addresses,
    *,
    s3: S3Access | None = None,
    lease_seconds: float = LEASE_SECONDS,
    adopt_blobs: bool = False,
) -> Iterator[Stores]:
    """Opens a state directory for a coordinator; StateHeld names a process that has it.

    A ledger that others can reach is theirs once this process is silent for `lease_seconds`. Blobs
    outside the directory that belong to another ledger are refused, unless `adopt_blobs`.
    """
    filesystem.make_directories(directory.absolute())
    with closing(lock.hold(directory)) as place:
        check_repaired(directory)
        keep_addresses(directory, addresses)
        with (
            opened(directory, addresses, s3, lease_seconds) as (ledger, blobs),
            # Before the blobs are claimed: a start that ends here has taken nobody's away.
            closing(SampleStore(directory / "telemetry.sqlite")) as samples,
        ):
            claim = ownership(directory, addresses, ledger=ledger.identity(), s3=s3)
            checks = {"check_place": place.check}
            if claim is not None:
                _check_owner(ledger, blobs, addresses, claim)
                claim.claim(adopt=adopt_blobs)
                checks["check_removal"] = claim.check
            # Changed only while this process has its directory, its ledger and them.
            fenced = FencedBlobs(blobs, ledger.check_held, **checks)
            yield Stores(ledger, fenced, Spool(directory / "spool"), samples)


@contextmanager
def at_rest(directory: Path, *, s3: S3Access | None = None) -> Iterator[tuple[Ledger, Blobs]]:
    """Opens an existing state directory for reading; StateHeld while a coordinator runs on it."""
    addresses = addresses_of(directory)
    with closing(lock.hold(directory)):
        check_repaired(directory)
        with opened(directory, addresses, s3) as found:
            yield found


@contextmanager
def opened(
    directory: Path, addresses: Addresses, s3: S3Access | None, lease_seconds: float = LEASE_SECONDS
) -> Iterator[tuple[Ledger, Blobs]]:
    """The ledger and the blobs of a directory that the caller holds."""
    location = addresses.ledger or directory / "ledger.sqlite"
    with (
        closing(engines.open_ledger(location, lease_seconds=lease_seconds)) as ledger,
        closing(open_blobs(directory, addresses, s3=s3)) as blobs,
    ):
        yield ledger, blobs


def check_repaired(directory: Path) -> None:
    """Refuses a directory whose repair was cut off: its ledger may be the old or the new one."""
    if (directory / REPAIR_FILE).exists():
        again = f"run `atoll repair {directory} --yes` again"
        raise StateDamaged(f"a repair of {str(directory)!r} was cut off; {again}")


def keep_addresses(directory: Path, addresses: Addresses) -> None:
    """Remembers where the stores are; a run whose stores move is refused by the setting's name."""
    path = directory / STORES_FILE
    if path.exists():
        known = addresses_of(directory)
        for name in ("ledger", "blobs"):
            kept, found = getattr(known, name), getattr(addresses, name)
            if kept != found:
                was = "inside the state directory" if kept is None else "given"
                moved = f"storage.{name} differs from where this run was created (it was {was})"
                way_out = "restore the setting, or start a new run in another directory"
                raise ConfigError(f"{moved}; {way_out}")
        return
    # For its owner alone: an address may hold a password.
    filesystem.write_whole(path, json.dumps(asdict(addresses)).encode())


def ownership(
    directory: Path, addresses: Addresses, *, ledger: str | None, s3: S3Access | None
) -> Ownership | None:
    """This run's claim to blobs outside its state directory; None when they are inside.

    `ledger` is `Ledger.identity`: a name that no copy has, or None for a file.
    """
    if addresses.blobs is None:
        return None
    # A file is told from its copies by where it is.
    place = f"{str(directory.resolve())!r} on {socket.gethostname()!r}"
    return Ownership(owner.marker(addresses.blobs, s3=s3), addresses.blobs, ledger or place)


def _check_owner(ledger: Ledger, blobs: Blobs, addresses: Addresses, claim: Ownership) -> None:
    """Refuses a new run where another keeps its blobs: each removes what it does not know.

    Blobs under this run's own name are left from a creation that was cut off; `soundness` checks
    that they are no more than that.
    """
    with ledger.reading() as t:
        is_new = t.run.get() is None
    if is_new and not claim.is_claimed() and next(iter(blobs.stored()), None) is not None:
        rule = "every run needs a place of its own, so add a prefix"
        raise ConfigError(f"storage.blobs={addresses.blobs!r} already holds blobs; {rule}")


def addresses_of(directory: Path) -> Addresses:
    """Where the stores of an existing state directory are."""
    path = directory / STORES_FILE
    if not path.exists():
        if (directory / "ledger.sqlite").exists():
            return Addresses()
        way_out = "give the directory that `atoll serve --dir` used"
        raise ConfigError(f"{str(directory)!r} is not a coordinator's state directory; {way_out}")
    try:
        with (
            filesystem.naming("read", path),
            os.fdopen(filesystem.SYSTEM.open(path), "rb") as file,
        ):
            kept = json.loads(file.read())
        return Addresses(kept["ledger"], kept["blobs"])
    except (ValueError, KeyError, TypeError) as exc:
        raise StateDamaged(
            f"{str(path)!r} does not say where ledger and blobs are ({exc}); restore it from a "
            f"copy, or write them there as [storage] of the run file has them: "
            f'{{"ledger": null, "blobs": null}} when both are in the directory'
        ) from exc


def open_blobs(directory: Path, addresses: Addresses, *, s3: S3Access | None = None) -> Blobs:
    """The blob store of a state directory."""
    location = addresses.blobs or str(directory / "blobs")
    return blob_stores.open_blobs(location, spool=directory / "blob-cache", s3=s3)
