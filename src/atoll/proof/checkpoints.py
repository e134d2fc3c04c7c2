"""The proof of a sharded run: chain, checkpoints, their blobs, and every row once.

Steps between checkpoints are not recorded and cannot be replayed: what is proved is that each
checkpoint is what was committed, and that its rows are done once.
"""

from atoll.blobs.base import Blobs
from atoll.data import numbered
from atoll.errors import AtollError, Exhausted
from atoll.layout import Layout
from atoll.ledger.chain import Break
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import CheckpointRecord, LeaseRecord, LeaseState, RoundRecord, RoundState
from atoll.proof import retention, rows
from atoll.proof.report import AuditReport, Progress
from atoll.rows import RowRange
from atoll.strategies import registry
from atoll.strategies.sharded.strategy import Sharded
from atoll.sums import digest as digests
from atoll.versions import parts
from atoll.versions.manifests import Manifests


def audit(
    report: AuditReport,
    ledger: Ledger,
    blobs: Blobs,
    *,
    layout: Layout,
    broken: Break | None,
    with_digests: bool,
    progress: Progress,
) -> None:
    """Checks the whole run; with `with_digests` also reads the weights of what is kept."""
    with ledger.reading() as t:
        rounds, checkpoints = t.rounds.all(), t.checkpoints.all()
        storage = retention.storage_of(t)
        start = retention.replay_start(t, storage)  # a repair did without what is before
        kept = {c.round for c in retention.kept_checkpoints(t, storage) if c.round >= start}
        held = {record.round: t.leases.of_round(record.round) for record in rounds}
        manifests = Manifests(t.manifests.all())
    if broken is not None:
        report.add(broken.round, f"chain: {broken.field}", broken.reason)
    by_round = {checkpoint.round: checkpoint for checkpoint in checkpoints}
    published = [r for r in rounds if r.state is RoundState.PUBLISHED]
    report.rounds = len(published)
    report.digest = manifests.first.manifest.model.initial_digest
    for record in published:
        checkpoint = by_round.pop(record.round, None)
        if checkpoint is None:
            report.add(record.round, "checkpoint", "the round is published without one")
            continue
        report.digest = record.master_digest
        asked = registry.sharded(manifests.of_round(record.round).manifest)
        _check_record(report, record, checkpoint, held[record.round], asked)
        _check_step(report, checkpoint, manifests)
        if record.round in kept:
            _check_blobs(
                report, record, checkpoint, blobs, manifests, layout, with_digests=with_digests
            )
            progress("replay", record.round, len(published))
        else:
            report.pruned += len(checkpoint.blobs)
    for number in by_round:
        report.add(number, "checkpoint", "it is of a round that is not published")
    for record in rounds:
        if record.state is not RoundState.PUBLISHED:
            _check_open(report, record, held[record.round])
    leases = [lease for given in held.values() for lease in given]
    rows.check_rows(report, leases, rounds)
    rows.check_work(report, ledger, leases, newest=rounds[-1].round if rounds else 0)
    if not report.problems:
        for damage in ledger.damage():
            report.add(int(damage.key) if damage.key.isdigit() else 0, "seal", str(damage))
    report.problems.sort(key=lambda problem: problem.round)


def _check_record(
    report: AuditReport,
    record: RoundRecord,
    checkpoint: CheckpointRecord,
    leases: list[LeaseRecord],
    asked: Sharded,
) -> None:
    """What a checkpoint counts is what its leases say is done, and its leaves are its digest's.

    Rows of late ranks are not done by it.
    """
    report.contributions += len(checkpoint.blobs)
    report.rows += checkpoint.rows
    report.tokens += checkpoint.tokens
    done = sum(x.stop - x.start for x in leases if x.state is LeaseState.DONE)
    if done != checkpoint.rows:
        said = f"leases say done {done}, the checkpoint counts {checkpoint.rows}"
        report.add(record.round, "rows", said)
    given = numbered.joined(lease.row_range for lease in leases)
    late = numbered.picked(given, asked.late_rows(checkpoint.late))
    right = sum(map(len, given)) - sum(map(len, late))
    in_both = _overlap([x.row_range for x in leases if x.state is LeaseState.DONE], late)
    if in_both or right != checkpoint.rows:
        said = (
            f"the checkpoint counts {checkpoint.rows}, the round without rows of late ranks "
            f"has {right}; {in_both} of theirs are done"
        )
        report.add(record.round, "rows of late ranks", said)
    found = digests.root_of(record.leaves or b"")
    if found != record.master_digest:
        said = f"they hash to {found}, the round's digest is {record.master_digest}"
        report.add(record.round, "leaves", said)


def _overlap(done: list[RowRange], late: list[RowRange]) -> int:
    """How many rows are in both."""
    both = sum(map(len, numbered.joined([*done, *late])))
    return sum(map(len, done)) + sum(map(len, late)) - both


def _check_step(report: AuditReport, checkpoint: CheckpointRecord, manifests: Manifests) -> None:
    asked = registry.sharded(manifests.of_round(checkpoint.round).manifest)
    _, last = asked.steps(checkpoint.round)
    if checkpoint.step != last:
        said = f"the checkpoint is of step {checkpoint.step}, its round ends with {last}"
        report.add(checkpoint.round, "step", said)


def _check_open(report: AuditReport, record: RoundRecord, leases: list[LeaseRecord]) -> None:
    """Rows of a round without a checkpoint are not done: its steps are tentative."""
    done = sum(x.stop - x.start for x in leases if x.state is LeaseState.DONE)
    if done:
        report.add(record.round, "rows", f"{done} are done in a round without a checkpoint")


def _check_blobs(
    report: AuditReport,
    record: RoundRecord,
    checkpoint: CheckpointRecord,
    blobs: Blobs,
    manifests: Manifests,
    layout: Layout,
    *,
    with_digests: bool,
) -> None:
    """Every part is there, right and of its size; the weights in them give the digest."""
    asked = registry.sharded(manifests.of_round(record.round).manifest)
    try:
        for rank, name in enumerate(checkpoint.blobs):
            with blobs.open(name) as reader:
                right = asked.save_bytes(layout, rank, len(checkpoint.blobs))
                if reader.nbytes != right:
                    said = f"the blob of rank {rank} has {reader.nbytes}, its shard makes {right}"
                    report.add(record.round, "nbytes", said)
                    return
        if with_digests:
            report.checkpoints_read = 1 + (report.checkpoints_read or 0)
            found = parts.digest_of(blobs, checkpoint.blobs, asked, layout)
            if found.root != record.master_digest:
                tensor = digests.first_difference(layout, found.leaves, record.leaves or b"")
                said = f"tensor {tensor!r} of the stored weights differs from what was committed"
                report.add(record.round, "weights", said)
    except Exhausted:
        raise  # says nothing about what is stored
    except AtollError as error:
        report.add(record.round, "blobs", str(error))
