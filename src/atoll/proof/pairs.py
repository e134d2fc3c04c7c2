"""The balance of (row, fragment) pairs: which fragments every row that is done has got into.

Where a round carries one fragment of several, a row is done with the contribution of its own round
and gets into the other fragments with later ones of the same island. Pure functions of records.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.ledger.records import ContributionRecord, RoundRecord, RoundState
from atoll.strategies.base import ALL

_CLOSED = (RoundState.FROZEN, RoundState.PUBLISHED)


@dataclass(frozen=True)
class FragmentBalance:
    """What has become of the done rows in one fragment."""

    fragment: int
    counted: int  # rows that are in one contribution of the fragment
    to_come: int  # the round that is to bring them into it is not closed yet
    missed: int  # their island began anew before it: they never get into it
    twice: int  # in two contributions, which must not be

    @property
    def holds(self) -> bool:
        return self.twice == 0


def balance(
    rounds: Sequence[RoundRecord],
    contributions: Iterable[ContributionRecord],
    *,
    fragments: int,
) -> list[FragmentBalance]:
    """The balance of each of so many `fragments`, in order, whether a round has carried it or not.

    Empty where there is one: every row is in it when it is done.
    """
    if fragments < 2:
        return []
    made: dict[str, list[ContributionRecord]] = {}
    for contribution in sorted(contributions, key=lambda c: c.round):
        made.setdefault(contribution.worker_id, []).append(contribution)
    return [_of_fragment(number, rounds, made.values()) for number in range(fragments)]


def _of_fragment(
    number: int,
    rounds: Sequence[RoundRecord],
    made: Iterable[Sequence[ContributionRecord]],
) -> FragmentBalance:
    rows = {"counted": 0, "to_come": 0, "missed": 0, "twice": 0}
    for of_worker in made:
        spans = _contained(number, of_worker)
        for contribution in of_worker:
            found = sum(first <= contribution.round <= last for first, last in spans)
            if found:
                key = "counted" if found == 1 else "twice"
            else:
                key = "to_come" if _is_to_come(number, rounds, contribution.round) else "missed"
            rows[key] += contribution.rows
    return FragmentBalance(number, **rows)


def _contained(number: int, made: Sequence[ContributionRecord]) -> list[tuple[int, int]]:
    """The first and last round whose rows each contribution brings into the fragment."""
    spans: list[tuple[int, int]] = []
    for contribution in made:
        if contribution.fragment in (number, ALL):
            first = contribution.first
            if contribution.fragment == ALL and spans:
                # It brings every fragment what that one has not got yet.
                first = max(first, spans[-1][1] + 1)
            spans.append((first, contribution.round))
    return spans


def _is_to_come(number: int, rounds: Sequence[RoundRecord], round_number: int) -> bool:
    """Whether the first round from `round_number` on that carries the fragment is not closed."""
    for record in rounds[round_number - 1 :]:
        if record.fragment in (number, ALL):
            return record.state not in _CLOSED
    return True
