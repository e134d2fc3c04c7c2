"""How a round of a gather run went, as a window of the library says it: one log event."""

from atoll.gather import clip, events, supports
from atoll.gather.consume import Done
from atoll.gather.findings import Thresholds, findings
from atoll.gather.overlap import PairCounts
from atoll.gather.partial import Accepted, Partial, Skipped
from atoll.gather.quality import quality
from atoll.gather.words import Reason
from atoll.strategies.gather.clipped import Clipped
from atoll.strategies.outcome import Measured, Outcome

OVERLAP = "overlap"


def report(outcome: Outcome, clipped: Clipped, counts: PairCounts) -> Measured:
    """Logs overlap, norms and quality of a round; the largest overlap of a pair to be shown.

    Copies are named and folded all the same: what was accepted has its receipt, and a round that
    left it out afterwards would not be the one that islands and proofs compute from the ledger.
    """
    accepted = tuple(
        Accepted(one.worker_id, one.sha256, one.nbytes, squares, one.stamp, 0, 0)
        for one, squares in zip(outcome.folded, clipped.squares, strict=True)
    )
    in_it = {one.uid for one in accepted}
    # One that was skipped and given rows again may be in at last; of several skips the last counts.
    left = {one.worker_id: one for one in outcome.left if one.worker_id not in in_it}
    skipped = tuple(
        Skipped(uid, Reason(one.reason), one.sentence) for uid, one in sorted(left.items())
    )
    found = findings(
        counts.shared,
        counts.equal,
        kept=supports.kept_by(clipped.layout.size),
        uids=[one.uid for one in accepted],
        stamps={one.uid: one.stamp for one in accepted},
        thresholds=Thresholds(),
    )
    done = Done(
        uids=tuple(one.uid for one in accepted),
        copies={},
        medians=clip.medians(clipped.squares),
        factors=clipped.factors,
        findings=found,
        digest=outcome.digest,
    )
    events.applied(
        outcome.round,
        done=done,
        quality=quality(
            [Partial(0, accepted, skipped)],
            primaries=outcome.primaries,
            reserves=outcome.reserves,
        ),
        seconds=outcome.seconds,
        download_bytes=sum(one.nbytes for one in accepted),
    )
    return {OVERLAP: found.max_overlap}
