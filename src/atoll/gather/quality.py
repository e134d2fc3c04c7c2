"""How a window went: whom it meant to take against whom it took, and why the others are missing."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from atoll.gather.exchange import accepted_of
from atoll.gather.partial import Partial
from atoll.gather.result import Merged, parts_of
from atoll.gather.words import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Numbers of one window. A mean score is None where no peer of the set has one."""

    intended: int  # primaries
    actual: int  # peers that were applied, reserves with them
    intended_mean_score: float | None
    actual_mean_score: float | None
    reserves_used: int
    success_rate: float  # actual / intended; 0.0 where nobody was meant
    skipped: int
    skips: Mapping[str, int]  # by reason, in the order of their words
    skips_by_fault: Mapping[str, int]  # "peer": theirs; "ours": it says nothing against them


def quality(
    result: Merged | Sequence[Partial],
    *,
    primaries: Sequence[str],
    reserves: Collection[str],
    copies: Collection[str] = (),
    scores: Mapping[str, float] | None = None,
) -> Quality:
    """What the final set of a window is worth; `copies` were accepted and then left out."""
    known = scores or {}
    accepted = [one.uid for one in accepted_of(result) if one.uid not in copies]
    skipped = {one.uid: one.reason for part in parts_of(result) for one in part.skipped}
    skipped |= dict.fromkeys(copies, Reason.COPY)
    reasons = Counter(str(reason) for reason in skipped.values())
    faults = Counter(str(reason.fault) for reason in skipped.values())
    return Quality(
        intended=len(primaries),
        actual=len(accepted),
        intended_mean_score=_mean(primaries, known),
        actual_mean_score=_mean(accepted, known),
        reserves_used=len(set(accepted) & set(reserves) - set(primaries)),
        success_rate=len(accepted) / len(primaries) if primaries else 0.0,
        skipped=len(skipped),
        skips=dict(sorted(reasons.items())),
        skips_by_fault={fault: faults[fault] for fault in ("peer", "ours")},
    )


def _mean(uids: Collection[str], scores: Mapping[str, float]) -> float | None:
    """Over those that have a score, in the order of uids: the same bits on every rank."""
    found = [scores[uid] for uid in sorted(uids) if uid in scores]
    return sum(found) / len(found) if found else None
