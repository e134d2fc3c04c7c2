"""Checkpoints: parts come in from all ranks, and one transaction makes them the run's.

It records the blobs, marks the rows done, adds a link to the chain and plans the next round. A
crash before it leaves blobs that nobody names, which are removed after the next one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.coordinator.sharded import late_ranks
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.intervals import Intervals
from atoll.coordinator.sharded.part_uploads import PartRequest, PartUploads
from atoll.data import numbered
from atoll.errors import BlobMissing, ContributionError, FrameTooLarge, WrongRound
from atoll.layout import Layout
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    CheckpointRecord,
    EvaluationRecord,
    GroupRecord,
    LeaseRecord,
    LeaseState,
    PartRecord,
    Published,
    RankRecord,
    RunRecord,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import retention
from atoll.protocol import losses
from atoll.protocol.sharded import PartReply, PartReport
from atoll.rows import Late
from atoll.sums.digest import ParamsDigest
from atoll.versions import parts as parts_of_checkpoints
from atoll.versions.manifests import Manifests

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Checkpoints:
    """What becomes of uploaded parts. Thread-safe; `commit_due` belongs to one thread."""

    ledger: Ledger
    blobs: Blobs
    clock: Clock
    intervals: Intervals
    _: KW_ONLY
    run: RunRecord
    manifests: Manifests
    layout: Layout
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.uploads = PartUploads(self.blobs, self.admit)
        self.groups: Groups | None = None  # set by whoever wires both

    @property
    def _groups(self) -> Groups:
        assert self.groups is not None, "wired before it is used"
        return self.groups

    def admit(self, request: PartRequest) -> None:
        """Refuses a part of another group or round, or of a size that no such part has."""
        group, mine = self._groups.member(request.identity, request.group)
        self._check_round(request.round)
        right = self.intervals.asked.save_bytes(self.layout, mine.rank, len(group.members))
        if request.nbytes != right:
            raise FrameTooLarge(
                f"nbytes={request.nbytes} of the part of rank {mine.rank} in group {group.number}; "
                f"its shard of {len(group.members)} makes {right}"
            )

    def _check_round(self, round_number: int) -> None:
        if round_number != self.intervals.next_commit:
            raise WrongRound(
                f"round={round_number} of the part is not the one whose checkpoint comes next, "
                f"which is {self.intervals.next_commit}; ask at the boundary how to go on"
            )

    def report(self, report: PartReport) -> PartReply:
        """Takes the word of a rank that its part is a blob; whether the checkpoint is recorded."""
        expected = self._expected(report)
        if expected is None:
            return PartReply(committed=True)
        # Outside the lock: a blob that an earlier life took in is read whole.
        key = (report.round, expected.worker_id)
        if not self.uploads.claims(key, report.blob, expected.nbytes):
            raise BlobMissing(
                f"blob={report.blob} of {expected.nbytes} bytes is not here; upload the part first"
            )
        with self._groups.lock:
            expected = self._expected(report)  # it may have been recorded meanwhile
            if expected is None:
                return PartReply(committed=True)
            with self.ledger.writing() as t:
                others = t.checkpoints.parts(expected.round, expected.group_number)
                late_ranks.check_same(expected, others)
                is_new = t.checkpoints.report(expected)
        # Not when it is looked at again: all that wait would look again, and so on.
        if is_new and self.is_due():
            self.changed()
        return PartReply(committed=False)

    def _expected(self, report: PartReport) -> PartRecord | None:
        """What is recorded of a part; None when its checkpoint is recorded already."""
        with self._groups.lock:  # under which checkpoints are recorded
            if report.round <= self.intervals.committed:
                return None
            group, mine = self._groups.member(report.identity, report.group)
            self._check_round(report.round)
            _, last = self.intervals.asked.steps(report.round)
            if report.step != last:
                raise WrongRound(
                    f"step={report.step} of the part is not the last of round {report.round}, "
                    f"{last}"
                )
            late_ranks.check(report, group, self.intervals.asked)
            self._check_told(report, group, mine)
        return PartRecord(
            round=report.round,
            group_number=group.number,
            rank=mine.rank,
            worker_id=mine.worker_id,
            part=report.part,
            blob=report.blob,
            nbytes=self.intervals.asked.save_bytes(self.layout, mine.rank, len(group.members)),
            loss_sum=report.loss_sum,
            tokens=report.tokens,
            evaluation_loss=report.evaluation_loss,
            evaluation_tokens=report.evaluation_tokens,
            late=report.late,
        )

    def _check_told(self, report: PartReport, group: GroupRecord, mine: RankRecord) -> None:
        """Refuses a part that is not of the sender's save, and tokens that cannot be."""
        with self.ledger.reading() as t:
            saves = t.saves.since(report.step)
        leases = [held for r, held in self.intervals.open.rounds if r.round == report.round]
        leased = sum(map(self.intervals.dispatch.tokens_of, leases))
        place = (group.number, report.step, mine.rank)
        own = [s.own for s in saves if (s.group_number, s.step, s.rank) == place]
        if report.part not in own:
            saved = f"was reported as {own[0]!r}" if own else "was not reported"
            raise ContributionError(
                f"part={report.part!r} of {mine.worker_id!r} is not its save of step "
                f"{report.step}, which {saved}; report the save, then its part"
            )
        late = sum(map(len, self.intervals.asked.late_rows(report.late)))
        counted = leased - self.intervals.dispatch.tokens_in(late)
        if report.tokens != counted:
            raise ContributionError(
                f"tokens={report.tokens} of {mine.worker_id!r} for round {report.round}, whose "
                f"leased rows hold {counted} without those of late ranks; count each row once"
            )
        losses.check(report.loss_sum, report.tokens, of="the part")
        losses.check(report.evaluation_loss, report.evaluation_tokens, of="its evaluation")

    def is_due(self) -> bool:
        """Whether a checkpoint has all its parts and is not recorded yet."""
        return self._whole() is not None

    def _whole(self) -> tuple[GroupRecord, list[PartRecord]] | None:
        """The newest group, over or not, and its parts of the next checkpoint, if all are in."""
        with self.ledger.reading() as t:
            group = t.groups.newest()
            if group is None:
                return None
            found = t.checkpoints.parts(self.intervals.next_commit, group.number)
        return (group, found) if len(found) == len(group.members) else None

    def commit_due(self) -> bool:
        """Records the checkpoint whose parts are all in; whether there was one."""
        found = self._whole()
        if found is None:
            return False
        group, parts = found
        number, names = parts[0].round, [part.blob for part in parts]
        asked = self.intervals.strategy_of(number)
        digest = parts_of_checkpoints.digest_of(self.blobs, names, asked, self.layout)
        self._commit(group, parts, digest)
        self.uploads.committed(number)
        log.info(
            "checkpoint recorded",
            extra={"round": number, "group": group.number, "digest": digest.root},
        )
        self.changed()
        self._prune()
        return True

    def _commit(
        self, group: GroupRecord, parts: Sequence[PartRecord], digest: ParamsDigest
    ) -> None:
        number = parts[0].round
        _, step = self.intervals.asked.steps(number)
        # No group is formed meanwhile: it would go back to what is before this.
        with self._groups.lock:
            with self.ledger.writing() as t:
                leases = self._trained(t, number, parts[0].late)
                checkpoint = CheckpointRecord(
                    round=number,
                    step=step,
                    group_number=group.number,
                    members=tuple(part.worker_id for part in parts),
                    parts=tuple(part.part for part in parts),
                    blobs=tuple(part.blob for part in parts),
                    rows=sum(lease.stop - lease.start for lease in leases),
                    tokens=self.intervals.dispatch.tokens_of(leases),
                    loss_sum=_mean(parts[0]) * self.intervals.dispatch.tokens_of(leases),
                    late=parts[0].late,
                )
                link = self._link(t, checkpoint, digest)
                for holder in {(lease.worker_id, lease.incarnation) for lease in leases}:
                    t.leases.finish(number, *holder)
                t.checkpoints.add(checkpoint)
                for part in parts:
                    if part.evaluation_tokens:
                        t.evaluations.add(
                            EvaluationRecord(
                                number,
                                part.worker_id,
                                part.evaluation_loss,
                                part.evaluation_tokens,
                            )
                        )
                t.saves.drop_below(step)
                holder_id = group.members[0].worker_id
                plans = self.intervals.plans(t, holder_id, committed=number)
                t.rounds.checkpoint(number, link, plans=plans)
            self.intervals.refresh()

    def _trained(self, t: Transaction, number: int, late: Sequence[Late]) -> Sequence[LeaseRecord]:
        """What is leased of a round but for the rows of late ranks, which are open again."""
        leases = t.leases.of_round(number)
        if not late:
            return leases
        asked = self.intervals.strategy_of(number)
        ranges = [lease.row_range for lease in leases]
        reopened = numbered.picked(ranges, asked.late_rows(late))
        for lease in leases:
            pieces = self.intervals.dispatch.split(lease, reopened, asked.manifest)
            if pieces != [lease]:
                t.leases.split(lease, pieces)
        rows = sum(len(span) for span in reopened)
        log.info("rows of late ranks are open again", extra={"round": number, "rows": rows})
        return [x for x in t.leases.of_round(number) if x.state is LeaseState.LEASED]

    def _link(
        self, t: Transaction, checkpoint: CheckpointRecord, digest: ParamsDigest
    ) -> Published:
        """The link that the round adds to the chain."""
        number = checkpoint.round
        *before, record = t.rounds.all(first=number - 1, last=number)
        genesis = chain.genesis_hash(self.run, self.manifests.first.sha256)
        prev_hash = before[0].hash if before else genesis
        assert prev_hash is not None, "checkpoints are recorded in order"
        linked = replace(record, prev_hash=prev_hash, master_digest=digest.root)
        return Published(
            prev_hash=prev_hash,
            hash=chain.checkpoint_hash(linked, checkpoint),
            master_digest=digest.root,
            published_digest=digest.root,
            leaves=digest.leaves,
            published_leaves=None,
            published_wall=self.clock.wall(),
        )

    def _prune(self) -> None:
        """Drops what no checkpoint that is kept consists of."""
        storage = self.manifests.of_round(self.intervals.committed).manifest.storage
        with self.uploads.sweeping():
            retention.prune(self.ledger, self.blobs, storage, in_flight=self.uploads.in_flight)


def _mean(part: PartRecord) -> float:
    return part.loss_sum / part.tokens if part.tokens else 0.0
