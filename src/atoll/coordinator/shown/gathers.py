"""What a gather run shows beside what every run does."""

from collections import Counter

from atoll.coordinator.counters import Counters
from atoll.coordinator.rounds.rounds import Rounds
from atoll.protocol.messages import GatherStatus

OVERLAP = "overlap"  # what it is measured as


def status(rounds: Rounds, counters: Counters) -> GatherStatus:
    """The round that closes next, with what it goes on without."""
    view = next((rounds.view(r.number) for r in rounds.open_rounds), None)
    given = set() if view is None else {*view.planned, *view.ended, *view.accepted}
    reserves = () if view is None else tuple(rounds.strategy_of(view.round).reserves(view))
    skips = [] if view is None else rounds.skips(view.round)
    with rounds.ledger.reading() as t:
        all_skips = t.skips.by_reason()
    counted = counters.counted
    return GatherStatus(
        primaries=tuple(sorted(given - {*reserves})),
        reserves=reserves,
        skips=dict(Counter(skip.reason for skip in skips)),
        all_skips=all_skips,
        accepted=counted["pulled_contributions"],
        reserves_used=counted["reserves_used"],
        pulled_bytes=counted["pulled_bytes"],
        overlap=counters.measured.get(OVERLAP),
    )
