"""The proof: hash chain, every contribution's bytes and counts, every row once, weights replayed.

Reads a ledger and blobs; changes neither. Finds problems instead of raising them, and names the
first round and tensor that differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from atoll.blobs.base import Blobs
from atoll.errors import AtollError
from atoll.history import replay, retention
from atoll.layout import Layout
from atoll.ledger import chain
from atoll.ledger.base import Ledger
from atoll.ledger.records import ContributionRecord, LeaseRecord, LeaseState, RoundState
from atoll.protocol.manifest import Manifest
from atoll.wire import frame

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Problem:
    """One thing that does not hold."""

    round: int
    what: str
    detail: str


@dataclass
class AuditReport:
    """What was checked and what was found."""

    run_id: str
    rounds: int = 0
    contributions: int = 0
    pruned: int = 0  # contributions whose blobs retention removed; their rows are in the chain
    rows: int = 0
    tokens: int = 0
    replayed_from: int | None = None
    replayed_rounds: int = 0
    digest: str | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {**asdict(self), "clean": self.clean}


def audit(
    ledger: Ledger,
    blobs: Blobs,
    *,
    manifest: Manifest,
    layout: Layout,
    with_replay: bool = False,
    progress: Progress = lambda *_: None,
) -> AuditReport:
    """Checks the whole run; with `with_replay` also rebuilds the weights of every round."""
    run = ledger.run()
    assert run is not None, "a ledger without a run cannot be audited"
    rounds = ledger.rounds()
    published = [r for r in rounds if r.state is RoundState.PUBLISHED]
    report = AuditReport(run.run_id, rounds=len(published))
    report.digest = published[-1].master_digest if published else manifest.model.initial_digest
    broken = chain.check_chain(run, ledger.manifests(), rounds, ledger.contributions)
    if broken is not None:
        report.problems.append(Problem(broken.round, f"chain: {broken.field}", broken.reason))
    start = retention.replay_start(ledger, manifest.storage)
    for done, record in enumerate(rounds, start=1):
        progress("contributions", done, len(rounds))
        for contribution in ledger.contributions(record.round):
            _check_contribution(report, blobs, contribution, pruned=record.round <= start)
        _check_leases(report, ledger, record.round)
    _check_rows(report, ledger, [record.round for record in rounds])
    if with_replay:
        report.problems.extend(
            _replay(report, ledger, blobs, manifest, layout, start=start, progress=progress)
        )
    return report


def _check_contribution(
    report: AuditReport, blobs: Blobs, contribution: ContributionRecord, *, pruned: bool
) -> None:
    report.contributions += 1
    report.rows += contribution.rows
    report.tokens += contribution.tokens
    if pruned:
        report.pruned += 1
        return
    try:
        with blobs.open(contribution.sha256) as reader:
            header, _ = frame.read_preamble(reader)
    except AtollError as error:
        report.problems.append(
            Problem(contribution.round, f"blob of {contribution.worker_id}", str(error))
        )
        return
    for name in ("round", "worker_id", "weight", "rows", "tokens"):
        said, recorded = getattr(header, name), getattr(contribution, name)
        if said != recorded:
            report.problems.append(
                Problem(
                    contribution.round,
                    f"{name} of {contribution.worker_id}",
                    f"the frame says {said!r}, the ledger {recorded!r}",
                )
            )


def _check_leases(report: AuditReport, ledger: Ledger, round_number: int) -> None:
    done: dict[str, int] = {}
    for lease in ledger.leases(round_number):
        if lease.state is LeaseState.DONE:
            done[lease.worker_id] = done.get(lease.worker_id, 0) + lease.stop - lease.start
    counted = {c.worker_id: c.rows for c in ledger.contributions(round_number)}
    if done != counted:
        report.problems.append(
            Problem(
                round_number,
                "rows",
                f"leases say done {done}, contributions count {counted}",
            )
        )


def _check_rows(report: AuditReport, ledger: Ledger, rounds: list[int]) -> None:
    done: list[LeaseRecord] = []
    for round_number in rounds:
        done += [x for x in ledger.leases(round_number) if x.state is LeaseState.DONE]
    done.sort(key=lambda lease: lease.start)
    for one, other in pairwise(done):
        if other.start < one.stop:
            report.problems.append(
                Problem(
                    other.round,
                    "row twice",
                    f"rows [{one.start}, {one.stop}) of round {one.round} and "
                    f"[{other.start}, {other.stop}) of round {other.round} overlap",
                )
            )


def _replay(
    report: AuditReport,
    ledger: Ledger,
    blobs: Blobs,
    manifest: Manifest,
    layout: Layout,
    *,
    start: int,
    progress: Progress,
) -> Iterator[Problem]:
    report.replayed_from = start
    try:
        if start:
            snapshot = next(s for s in ledger.snapshots() if s.version == start)
            state = replay.snapshot_state(blobs, snapshot, manifest, layout)
        else:
            state = replay.initial_state(ledger, blobs, manifest, layout)
        for replayed in replay.replay(state, ledger, blobs, manifest=manifest, after_version=start):
            progress("replay", replayed.record.round, report.rounds)
            report.replayed_rounds += 1
            difference = replay.difference(layout, replayed)
            if difference is not None:
                yield Problem(replayed.record.round, "replay", difference)
                return
    except AtollError as error:
        yield Problem(start + report.replayed_rounds + 1, "replay", str(error))
