"""The proof: hash chain, every contribution's bytes and counts, every row once, weights replayed.

Reads a ledger and blobs; changes neither. Finds problems instead of raising them, and names the
first round and tensor that differ.
"""

from collections.abc import Iterator, Mapping, Sequence

from atoll.blobs.base import Blobs
from atoll.errors import AtollError, Exhausted
from atoll.layout import Layout
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    RoundRecord,
    RoundState,
)
from atoll.proof import artifacts, balance, checkpoints, pairs, residuals, retention, statements
from atoll.proof import rows as row_checks
from atoll.proof.report import AuditReport, Problem, Progress
from atoll.strategies.base import Strategy
from atoll.sums import digest as digests
from atoll.versions.manifests import Manifests, Recorded
from atoll.versions.replay import Digests, Replay
from atoll.wire import frame
from atoll.wire.header import FrameHeader

# What a frame's header says, and where the ledger records it.
_IN_BOTH = {name: name for name in ("round", "worker_id", "weight", "rows", "tokens", "loss_sum")}
_IN_BOTH |= {name: name for name in ("first", "fragment", "residual", "carried")}
_IN_BOTH |= {"base_digest": "base"}


def audit(
    ledger: Ledger,
    blobs: Blobs,
    *,
    layout: Layout,
    with_replay: bool = False,
    progress: Progress = lambda *_: None,
) -> AuditReport:
    """Checks the whole run; with `with_replay` also rebuilds the weights of every round.

    Of a sharded run the weights are not rebuilt but read: every checkpoint that is kept.
    """
    with ledger.reading() as t:
        run, recorded, rounds = t.run.get(), t.manifests.all(), t.rounds.all()
        assert run is not None, "a ledger without a run cannot be audited"
        broken = chain.check_chain(
            run, recorded, rounds, t.contributions.of_round, t.checkpoints.all()
        )
        manifests = Manifests(recorded)
        start = retention.replay_start(t, retention.storage_of(t))
        workers = t.members.workers()
    if manifests.first.any_strategy.by_step:
        found = AuditReport(run.run_id)
        checkpoints.audit(
            found,
            ledger,
            blobs,
            layout=layout,
            broken=broken,
            with_digests=with_replay,
            progress=progress,
        )
        return found
    published = [r for r in rounds if r.state is RoundState.PUBLISHED]
    report = AuditReport(run.run_id, rounds=len(published))
    replay = Replay(ledger, blobs, manifests=manifests, layout=layout)
    report.digest = _newest_digest(published, replay)
    if broken is not None:
        report.add(broken.round, f"chain: {broken.field}", broken.reason)
    with ledger.reading() as t:
        held = {record.round: t.leases.of_round(record.round) for record in rounds}
    misnamed: list[Problem] = []
    folded: list[ContributionRecord] = []
    counted: dict[int, dict[str, int]] = {}  # by the round they were made for: worker -> rows
    for done, record in enumerate(rounds, start=1):
        progress("contributions", done, len(rounds))
        _check_round(report, record, manifests.of_round(record.round).round_strategy)
        with ledger.reading() as t:
            contributions = t.contributions.of_round(record.round)
        for contribution in contributions:
            header = _check_contribution(report, blobs, contribution, pruned=record.round <= start)
            misnamed += _check_named(header, held.get(contribution.round, []))
            _check_applied(report, contribution, manifests.of_round(contribution.round))
            counted.setdefault(contribution.round, {})[contribution.worker_id] = contribution.rows
            folded.append(contribution)
    _check_fragments(report, rounds, folded, fragments=len(replay.fragments.parts))
    report.residuals = residuals.lost(folded, workers)
    for number, given in held.items():
        _check_leases(report, number, counted.get(number, {}), given)
    leases = [lease for given in held.values() for lease in given]
    row_checks.check_rows(report, leases, rounds)
    report.problems += misnamed
    if manifests.first.any_strategy.gathers:
        under = {record.round: record.manifest_sha256 for record in rounds}
        statements.check(report, ledger, folded, held, under)
    row_checks.check_work(report, ledger, leases, newest=rounds[-1].round if rounds else 0)
    if with_replay:
        _replay(report, replay, start=start, progress=progress)
    if not report.problems:
        # Only then: what the records say about each other names it better.
        for damage in ledger.damage():
            report.add(int(damage.key) if damage.key.isdigit() else 0, "seal", str(damage))
    # The first one named is the first round that differs.
    report.problems.sort(key=lambda problem: problem.round)
    return report


def _check_round(report: AuditReport, record: RoundRecord, strategy: Strategy) -> None:
    """A round carries the fragment that the strategy says, and its leaves hash to its digests.

    The digests are in the hash chain and the leaves are not. Whether the plan took the round for
    the last one is not recorded apart: either answer is right.
    """
    right = {strategy.fragment(record.round, is_last=is_last) for is_last in (False, True)}
    if record.fragment not in right:
        wanted = " or ".join(map(str, sorted(right)))
        said = f"the round records {record.fragment}, its strategy says {wanted}"
        report.add(record.round, "fragment", said)
    if record.state is RoundState.PUBLISHED:
        both = Digests.of(record)
        for name, digest in (("leaves", both.master), ("published_leaves", both.published)):
            found = digests.root_of(digest.leaves)
            if found != digest.root:
                said = f"they hash to {found}, the round's digest is {digest.root}"
                report.add(record.round, name, said)


def _newest_digest(published: Sequence[RoundRecord], replay: Replay) -> str | None:
    """The recorded digest of the newest version, out of the newest round of each fragment.

    None where a fragment has never been moved: only a replay knows it then.
    """
    if not published:
        return replay.manifests.first.manifest.model.initial_digest
    known = {record.round: record for record in published}
    found = replay.recorded(reversed(known), known.get)
    if len(found) < len(replay.fragments.parts):
        return None
    return digests.composed(found[number].master for number in sorted(found)).root


def _check_contribution(
    report: AuditReport, blobs: Blobs, contribution: ContributionRecord, *, pruned: bool
) -> FrameHeader | None:
    """The header of the stored frame, where there is one to read."""
    report.contributions += 1
    report.rows += contribution.rows
    report.tokens += contribution.tokens
    report.staleness = max(report.staleness, contribution.applied - contribution.round)
    if pruned:
        report.pruned += 1
        return None
    try:
        with blobs.open(contribution.sha256) as reader:
            header, _ = frame.read_preamble(reader)
            nbytes = reader.nbytes
    except Exhausted:
        raise  # says nothing about what is stored
    except AtollError as error:
        report.add(contribution.round, f"blob of {contribution.worker_id}", str(error))
        return None
    if nbytes != contribution.nbytes:
        said = f"the blob has {nbytes}, the ledger {contribution.nbytes}"
        report.add(contribution.round, f"nbytes of {contribution.worker_id}", said)
    for name, column in _IN_BOTH.items():
        told, recorded = getattr(header, name), getattr(contribution, column)
        # A frame with rows of its own round alone names no first one.
        if name == "first":
            told = told or header.round
        if told != recorded:
            said = f"the frame says {told!r}, the ledger {recorded!r}"
            report.add(contribution.round, f"{name} of {contribution.worker_id}", said)
    return header


def _check_applied(report: AuditReport, c: ContributionRecord, recorded: Recorded) -> None:
    """The round that folds a contribution may take it, as the strategy says."""
    if recorded.round_strategy.destination(c.round, [c.applied]) != c.applied:
        said = f"made for round {c.round}, it is too old or not for round {c.applied}"
        report.add(c.applied, f"applied of {c.worker_id}", said)


def _check_named(header: FrameHeader | None, leases: Sequence[LeaseRecord]) -> Iterator[Problem]:
    """Compares the rows that a frame names with those that its leases call done."""
    if header is None:
        return
    done = balance.merged(
        lease.row_range
        for lease in leases
        if lease.worker_id == header.worker_id and lease.state is LeaseState.DONE
    )
    named = balance.merged(header.ranges)
    if named != done:
        yield Problem(
            header.round,
            f"ranges of {header.worker_id}",
            f"the frame names rows {named}, the leases say done {done}",
        )


def _check_leases(
    report: AuditReport, number: int, counted: Mapping[str, int], leases: Sequence[LeaseRecord]
) -> None:
    """Compares the rows that a round's leases call done with those its contributions count."""
    done: dict[str, int] = {}
    for lease in leases:
        if lease.state is LeaseState.DONE:
            done[lease.worker_id] = done.get(lease.worker_id, 0) + lease.stop - lease.start
    if done != counted:
        report.add(number, "rows", f"leases say done {done}, contributions count {counted}")


def _check_fragments(
    report: AuditReport,
    rounds: Sequence[RoundRecord],
    folded: Sequence[ContributionRecord],
    *,
    fragments: int,
) -> None:
    """Every row that is done is in each fragment at most once."""
    report.fragments = pairs.balance(rounds, folded, fragments=fragments)
    for found in report.fragments:
        if not found.holds:
            said = f"{found.twice} rows are in two contributions of fragment {found.fragment}"
            report.add(rounds[-1].round, "row and fragment twice", said)


def _replay(report: AuditReport, replay: Replay, *, start: int, progress: Progress) -> None:
    """Replays every round after `start` and compares weights and snapshots with their records."""
    report.replayed_from = start
    with replay.ledger.reading() as t:
        snapshots = {snapshot.version: snapshot for snapshot in t.snapshots.all()}
    reached = start  # the round that an error below belongs to
    try:
        version = replay.restore(snapshots[start] if start else None)
        reached, base = start + 1, version.digests.published.root
        for replayed in replay.onward(version):
            number = replayed.record.round
            progress("replay", number, report.rounds)
            report.replayed_rounds += 1
            difference = replayed.difference()
            if difference is not None:
                report.add(number, "replay", difference)
                return
            artifacts.check(report, replay, replayed, base=base)
            base = version.digests.published.root
            if number in snapshots:
                difference = replay.snapshot_difference(version, snapshots[number])
                if difference is not None:
                    report.add(number, "snapshot", difference)
            reached = number + 1
        report.digest = version.digests.master.root
    except Exhausted:
        raise  # says nothing about what is stored
    except AtollError as error:
        report.add(reached, "replay", str(error))
