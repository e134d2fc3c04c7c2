"""When a snapshot is written, and what is pruned after it.

Owns the debt: a snapshot that found no room is written once there is some. What a snapshot
consists of is decided by versions, what may be dropped by retention.
"""

import logging
from collections.abc import Callable, Set
from dataclasses import KW_ONLY, dataclass, field

from atoll.blobs.base import Blobs
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.errors import StorageFull
from atoll.ledger.ledger import Ledger
from atoll.proof import retention
from atoll.versions.manifests import Manifests

log = logging.getLogger(__name__)


@dataclass
class Snapshots:
    """Snapshots of the newest version; for the thread that closes rounds, or when none does."""

    ledger: Ledger
    blobs: Blobs
    weights: RunWeights
    disk: DiskSpace
    _: KW_ONLY
    manifests: Manifests
    in_flight: Callable[[], Set[str]]
    _is_owed: bool = field(default=False, init=False)

    def published(self, version: int, *, is_last: bool) -> None:
        """Writes a snapshot of a version that was just published, if one is due.

        It is owed when there is no room for it: the round is published all the same.
        """
        storage = self.manifests.of_round(version).manifest.storage
        if version % storage.snapshot_every == 0 or is_last:
            self._is_owed = True
            try:
                self.catch_up()
            except StorageFull as error:
                self.disk.ran_out(error)

    def catch_up(self) -> None:
        """Writes the snapshot that is owed; before the next round is computed, while it can be.

        StorageFull while there is no room; it is still owed then.
        """
        if not self._is_owed:
            return
        self._add()
        storage = self.manifests.of_round(self.weights.current.version).manifest.storage
        retention.prune(self.ledger, self.blobs, storage, in_flight=self.in_flight)
        self._is_owed = False

    def save(self) -> None:
        """Writes a snapshot of the newest version unless there is one; while no round closes."""
        if not self.weights.is_settled:
            return  # a round was computed and found no room to be recorded: the next start does it
        try:
            self._add()
        except StorageFull as error:
            log.warning("no room for a snapshot", extra={"reason": str(error)})

    def _add(self) -> None:
        version = self.weights.current.version
        with self.ledger.reading() as t:
            newest = t.snapshots.all()[-1:]
        if version and not (newest and newest[0].version == version):
            made = self.weights.snapshot()
            with self.ledger.writing() as t:
                t.snapshots.add(made)
