"""What the counts of shared places say: which pairs are too much alike, and who is to blame.

Blamed is the peer whose object came later, by the time of its own server. Where a time is unknown,
or both are equal, nobody is: an innocent is never blamed for a copy of its own work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Literal, get_args

from atoll.compiled.arrays import Integers
from atoll.errors import ConfigError

Level = Literal["high", "max", "mega"]
LEVELS: tuple[Level, ...] = get_args(Level)  # ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """From which share of places on a pair is of a level; templar's numbers."""

    high: float = 0.4
    max: float = 0.5
    mega: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.high <= self.max <= self.mega <= 1:
            raise ConfigError(
                f"overlap thresholds high={self.high}, max={self.max}, mega={self.mega} must "
                f"ascend between 0 and 1"
            )

    def level(self, overlap: float) -> Level | None:
        """The highest level that an overlap reaches."""
        reached = [one for one in LEVELS if overlap >= getattr(self, one)]
        return reached[-1] if reached else None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two peers that share too many places."""

    uids: tuple[str, str]  # in order
    overlap: float  # shared places of those that each sends
    equal_codes: float  # of the shared ones, those with equal codes: 1.0 for a plain copy
    level: Level
    blamed: str | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Fields as templar names them, and the share of equal codes. Fewer than two peers: zeros."""

    pairs_checked: int = 0
    pairs_high_ovlap: int = 0
    ratio_high_ovlap: float = 0.0
    mean_overlap: float = 0.0
    min_overlap: float = 0.0
    max_overlap: float = 0.0
    mean_equal_codes: float = 0.0  # of all places shared by any pair
    pairs_over_thresh: tuple[Pair, ...] = ()
    uids_over_thresh: Mapping[str, Level] = field(default_factory=lambda: MappingProxyType({}))


def findings(
    shared: Integers,
    equal: Integers,
    *,
    kept: int,
    uids: Sequence[str],
    stamps: Mapping[str, float | None],
    thresholds: Thresholds,
) -> Findings:
    """What counts [peers, peers], of `kept` places that each peer sends, say about `uids`."""
    rows = list(combinations(range(len(uids)), 2))
    if not rows or not kept:
        return Findings()
    counts = [int(shared[a, b]) for a, b in rows]
    pairs = []
    for (a, b), count in zip(rows, counts, strict=True):
        level = thresholds.level(count / kept)
        if level is not None:
            names = (uids[a], uids[b])
            share = int(equal[a, b]) / count
            pairs.append(Pair(names, count / kept, share, level, _later(names, stamps)))
    same = sum(int(equal[a, b]) for a, b in rows)
    return Findings(
        pairs_checked=len(rows),
        pairs_high_ovlap=len(pairs),
        ratio_high_ovlap=len(pairs) / len(rows),
        mean_overlap=sum(counts) / (kept * len(rows)),
        min_overlap=min(counts) / kept,
        max_overlap=max(counts) / kept,
        mean_equal_codes=same / sum(counts) if any(counts) else 0.0,
        pairs_over_thresh=tuple(pairs),
        uids_over_thresh=MappingProxyType(_offenders(pairs)),
    )


def _later(uids: tuple[str, str], stamps: Mapping[str, float | None]) -> str | None:
    """Whose object came later; None where nobody can say."""
    first, second = (stamps.get(uid) for uid in uids)
    if first is None or second is None or first == second:
        return None
    return uids[1] if second > first else uids[0]


def _offenders(pairs: Sequence[Pair]) -> dict[str, Level]:
    """The highest level of each blamed peer, in the order of uids."""
    found: dict[str, Level] = {}
    for pair in sorted(pairs, key=lambda pair: LEVELS.index(pair.level)):
        if pair.blamed is not None:
            found[pair.blamed] = pair.level
    return dict(sorted(found.items()))
