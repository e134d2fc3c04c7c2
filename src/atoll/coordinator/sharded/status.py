"""What the coordinator of a sharded run shows: checkpoints, the group, and who waits for one."""

from dataclasses import dataclass
from typing import Literal

from atoll.coordinator.counters import Counters
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.intervals import Intervals
from atoll.coordinator.sharded.saves import Saves
from atoll.coordinator.shown import status as shown
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import CheckpointRecord, RoundRecord
from atoll.proof import losses
from atoll.protocol.messages import RoundStatus, Status
from atoll.versions.manifests import Manifests


@dataclass(frozen=True, kw_only=True)
class ShardedReport:
    """Reads, from request threads; changes nothing. Its parts may be of different moments."""

    run_id: str
    ledger: Ledger
    membership: Membership
    manifests: Manifests
    intervals: Intervals
    groups: Groups
    saves: Saves
    counters: Counters
    disk: DiskSpace

    def newest(self) -> tuple[int, str]:
        """The newest checkpoint's round and its params digest; 0 and that of the initial weights.

        Before the first checkpoint.
        """
        number = self.intervals.committed
        if number:
            with self.ledger.reading() as t:
                [record] = t.rounds.all(first=number, last=number)
            assert record.master_digest is not None, "a committed round has its digest"
            return number, record.master_digest
        return 0, self.manifests.first.manifest.model.initial_digest

    def status(self) -> Status:
        """The run at this moment."""
        version, digest = self.newest()
        group, counted = self.groups.present, self.counters.counted
        in_force, manifest = self.manifests.in_force, self.manifests.in_force.manifest
        with self.ledger.reading() as t:
            checkpoint = t.checkpoints.newest()
        return Status(
            run_id=self.run_id,
            name=manifest.name,
            state=self._state(),
            version=version,
            rounds=manifest.stop.rounds or None,
            digest=digest,
            manifest_sha256=in_force.sha256,
            tokens=self.intervals.open.tokens,
            workers=shown.workers(self.membership.registry),
            history=self._history(version),
            waiting_for=self.groups.waited_for(),
            refusals=dict(self.counters.refusals),
            stale_contributions=0,
            resyncs=0,
            bytes_received=counted["bytes_received"],
            bytes_sent=counted["bytes_sent"],
            refused_queues=self.intervals.dispatch.refused,
            storage_full=self.disk.reason,
            damaged=self.groups.stands_still(),
            group=0 if group is None else group.number,
            ring=() if group is None else tuple(m.worker_id for m in group.members),
            consistent=self.saves.consistent(),
            checkpoint=0 if checkpoint is None else checkpoint.step,
            notes=self.groups.notes(),
        )

    def _state(self) -> Literal["waiting", "training", "paused", "finished"]:
        if self.intervals.is_finished():
            return "finished"
        if self.membership.control.command.action == "pause":
            return "paused"
        return "waiting" if self.groups.present is None else "training"

    def _history(self, version: int) -> tuple[RoundStatus, ...]:
        first = max(1, version - shown.HISTORY_ROUNDS + 1)
        with self.ledger.reading() as t:
            held_out = losses.held_out_losses(t, first=0 if first == 1 else first)
            records = {r.round: r for r in t.rounds.all(first=first, last=version)}
            checkpoints = [c for c in t.checkpoints.all() if first <= c.round <= version]

        def row(checkpoint: CheckpointRecord, record: RoundRecord) -> RoundStatus:
            tokens = checkpoint.tokens
            return RoundStatus(
                round=checkpoint.round,
                contributions=len(checkpoint.members),
                tokens=tokens,
                train_loss=checkpoint.loss_sum / tokens if tokens else None,
                evaluation_loss=held_out.get(checkpoint.round),
                digest=record.master_digest,
            )

        return tuple(row(checkpoint, records[checkpoint.round]) for checkpoint in checkpoints)
