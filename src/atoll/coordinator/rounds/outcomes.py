"""What the ledger says became of a round, for its outer step to tell people."""

from collections.abc import Sequence

from atoll.coordinator.rounds.rounds import Rounds
from atoll.ledger.records import ContributionRecord
from atoll.strategies.base import RoundView
from atoll.strategies.outcome import Folded, Left, Outcome
from atoll.sums.digest import ParamsDigest


def of_round(
    rounds: Rounds,
    round_number: int,
    contributions: Sequence[ContributionRecord],
    *,
    digest: ParamsDigest,
    seconds: float,
) -> Outcome:
    """A round that is published with `digest` and took so many `seconds` to compute."""
    with rounds.ledger.reading() as t:
        given = frozenset(lease.worker_id for lease in t.leases.of_round(round_number))
        stamps = {a.worker_id: a.stamp for a in t.announcements.of_round(round_number)}
        skips = t.skips.of_round(round_number)
    accepted = frozenset(c.worker_id for c in contributions)
    view = RoundView(round=round_number, planned=given, accepted=accepted, live=frozenset())
    reserves = rounds.strategy_of(round_number).reserves(view)
    return Outcome(
        round=round_number,
        folded=[
            Folded(
                worker_id=c.worker_id,
                sha256=c.sha256,
                nbytes=c.nbytes,
                stamp=stamps.get(c.worker_id),
            )
            for c in contributions
        ],
        left=[Left(worker_id=s.worker_id, reason=s.reason, sentence=s.sentence) for s in skips],
        primaries=sorted(given - {*reserves}),
        reserves=reserves,
        digest=digest,
        seconds=seconds,
    )
