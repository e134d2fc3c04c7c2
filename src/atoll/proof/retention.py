"""What is kept: prunes blobs that no record needs for replay from the oldest kept snapshot."""

import logging
from collections.abc import Callable, Set

from atoll.blobs.base import Blobs
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import CheckpointRecord
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import StorageSettings
from atoll.versions.manifests import Manifests

log = logging.getLogger(__name__)

REPLAY_FROM = "replay_from"  # in the ledger's control table


def storage_of(t: Transaction) -> StorageSettings:
    """The storage settings in force: those of the latest round."""
    latest = t.rounds.latest()
    manifests = Manifests(t.manifests.all())
    return manifests.of_round(0 if latest is None else latest.round).manifest.storage


def replay_start(t: Transaction, storage: StorageSettings) -> int:
    """The version replay begins at: 0 when all is kept, else the oldest kept snapshot's.

    A repair that had to do without older blobs has recorded a later one.
    """
    repaired = int(t.control.all().get(REPLAY_FROM, 0))
    return max(repaired, kept_from(t, storage))


def kept_from(t: Transaction, storage: StorageSettings | None) -> int:
    """The version after which every round still has all its blobs."""
    pruned = storage is not None and storage.retain == "snapshots"
    snapshots = t.snapshots.all() if pruned else []
    return snapshots[0].version if snapshots else 0


def referenced(t: Transaction, storage: StorageSettings | None) -> set[str]:
    """Blobs named by the run, by kept snapshots, and by rounds that replay needs.

    With None for `storage`: by any round at all.
    """
    run = t.run.get()
    assert run is not None, "a ledger without a run references nothing"
    names = {run.initial_sha256}
    for snapshot in t.snapshots.all():
        names |= {snapshot.master_sha256, snapshot.published_sha256}
        names |= {sha256 for _, sha256 in snapshot.slots_sha256}
    names |= {blob for checkpoint in kept_checkpoints(t, storage) for blob in checkpoint.blobs}
    names |= {part.blob for part in t.checkpoints.every_part()}
    return names | t.contributions.blobs(first=kept_from(t, storage) + 1)


def kept_checkpoints(t: Transaction, storage: StorageSettings | None) -> list[CheckpointRecord]:
    """Checkpoints of a sharded run whose blobs are kept, oldest first."""
    pruned = storage is not None and storage.retain == "snapshots"
    found = t.checkpoints.all()
    return found[-storage.keep_snapshots :] if storage is not None and pruned else found


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
    if storage.retain == "snapshots":
        with ledger.writing() as t:
            kept = t.snapshots.all()[-storage.keep_snapshots :]
            t.snapshots.drop_below(kept[0].version if kept else 0)
    stored = [ref.sha256 for ref in blobs.stored()]
    needed = set(in_flight())
    with ledger.reading() as t:
        needed |= referenced(t, storage)
    garbage = [sha256 for sha256 in stored if sha256 not in needed]
    for sha256 in garbage:
        blobs.delete(sha256)
    if garbage:
        log.info("blobs removed", extra={"count": len(garbage)})
    return len(garbage)
