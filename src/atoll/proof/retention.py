"""What is kept: prunes blobs that no record needs for replay from the oldest kept snapshot."""

import logging
from collections.abc import Callable, Sequence, Set

from atoll.blobs.base import Blobs
from atoll.ledger.base import Ledger
from atoll.ledger.records import RoundRecord
from atoll.protocol.manifest import StorageSettings
from atoll.versions.manifests import Manifests

log = logging.getLogger(__name__)

REPLAY_FROM = "replay_from"  # in the ledger's control table


def storage_of(rounds: Sequence[RoundRecord], manifests: Manifests) -> StorageSettings:
    """The storage settings in force: those of the latest round."""
    latest = rounds[-1].round if rounds else 1
    return manifests.of_round(latest).manifest.storage


def replay_start(ledger: Ledger, storage: StorageSettings) -> int:
    """The version replay begins at: 0 when all is kept, else the oldest kept snapshot's.

    A repair that had to do without older blobs has recorded a later one.
    """
    repaired = int(ledger.control().get(REPLAY_FROM, 0))
    return max(repaired, kept_from(ledger, storage))


def kept_from(ledger: Ledger, storage: StorageSettings | None) -> int:
    """The version that pruning leaves everything after."""
    pruned = storage is not None and storage.retain == "snapshots"
    snapshots = ledger.snapshots() if pruned else []
    return snapshots[0].version if snapshots else 0


def referenced(ledger: Ledger, storage: StorageSettings | None) -> set[str]:
    """Blobs named by the run, by kept snapshots, and by rounds that replay needs.

    With None for `storage`: by any round at all.
    """
    run = ledger.run()
    assert run is not None, "a ledger without a run references nothing"
    names = {run.initial_sha256}
    for snapshot in ledger.snapshots():
        names |= {snapshot.master_sha256, snapshot.published_sha256}
        names |= {sha256 for _, sha256 in snapshot.slots_sha256}
    return names | ledger.accepted_blobs(first=kept_from(ledger, storage) + 1)


def prune(
    ledger: Ledger,
    blobs: Blobs,
    storage: StorageSettings,
    *,
    in_flight: Callable[[], Set[str]] = frozenset,
) -> int:
    """Drops old snapshots as `storage` says, and every blob nothing references; returns how many.

    The ledger forgets a snapshot before its blobs go: a crash between the two leaves blobs that
    the next call removes, never a record without its blob. `in_flight` names blobs that are stored
    and about to be recorded. It is asked after the listing and before the records are read, so a
    blob that is recorded meanwhile is in one of the two answers.
    """
    snapshots = ledger.snapshots()
    if storage.retain == "snapshots" and len(snapshots) > storage.keep_snapshots:
        ledger.drop_snapshots(below_version=snapshots[-storage.keep_snapshots].version)
    stored = [ref.sha256 for ref in blobs.stored()]
    needed = set(in_flight())
    needed |= referenced(ledger, storage)
    garbage = [sha256 for sha256 in stored if sha256 not in needed]
    for sha256 in garbage:
        blobs.delete(sha256)
    if garbage:
        log.info("blobs removed", extra={"count": len(garbage)})
    return len(garbage)
