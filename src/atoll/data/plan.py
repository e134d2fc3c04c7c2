"""Which rows each worker trains in one round of sync mode: a pure function of the ledger's state.

Owns the arithmetic only: it knows no ledger, no lease and no time. Positions count the run's
endless row sequence; `shuffle` says which dataset row a position is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.errors import ConfigError, StateDamaged


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Positions `[start, stop)` of the run's row sequence."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise StateDamaged(
                f"rows [{self.start}, {self.stop}) hold no row; a range must start at 0 or later "
                f"and end after its start; run `atoll audit` on the state directory"
            )

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one round. Every planned row is from a taken range or from before `cursor`.

    Rows in `ranges` = rows in `taken` - rows in `left` + fresh rows before the new `cursor`.
    """

    ranges: dict[str, tuple[Range, ...]]  # by worker_id, in worker_id order
    cursor: int  # first position that no plan has used
    taken: tuple[Range, ...]  # reopened ranges of which rows were given out, as they were passed in
    left: tuple[Range, ...]  # the rest of the last taken range, if it was not needed whole


def plan(workers: Sequence[str], *, rows_each: int, cursor: int, reopened: Sequence[Range]) -> Plan:
    """Gives each worker exactly `rows_each` rows: reopened ones first, then fresh ones.

    Workers are served in worker_id order and reopened ranges in row order, so the result does not
    depend on the order of the arguments. Reopened ranges that overlap or reach beyond `cursor`
    would train a row twice: StateDamaged.
    """
    _check(workers, rows_each=rows_each)
    waiting = sorted(reopened)
    _check_reopened(waiting, cursor=cursor)
    taken: list[Range] = []
    part: Range | None = None  # what remains of the last taken range
    ranges: dict[str, tuple[Range, ...]] = {}
    for worker in sorted(workers):
        mine: list[Range] = []
        missing = rows_each
        while missing and (part or waiting):
            if part is None:
                part = waiting.pop(0)
                taken.append(part)
            stop = min(part.start + missing, part.stop)
            mine.append(Range(part.start, stop))
            part = Range(stop, part.stop) if stop < part.stop else None
            missing -= len(mine[-1])
        if missing:
            mine.append(Range(cursor, cursor + missing))
            cursor += missing
        ranges[worker] = tuple(mine)
    return Plan(ranges, cursor, tuple(taken), (part,) if part else ())


def _check(workers: Sequence[str], *, rows_each: int) -> None:
    if rows_each < 1:
        raise ConfigError(f"rows_each={rows_each!r} must be at least 1; raise sync_every or batch")
    for one, other in pairwise(sorted(workers)):
        if one == other:
            raise ConfigError(f"worker_id {one!r} is planned twice; each worker is planned once")


def _check_reopened(ordered: Sequence[Range], *, cursor: int) -> None:
    for one, other in pairwise([*ordered, None]):
        limit, name = (other.start, "the next range") if other else (cursor, "the cursor")
        if one is not None and one.stop > limit:
            raise StateDamaged(
                f"reopened rows [{one.start}, {one.stop}) reach past {name} at {limit}; a row is "
                f"given out once at a time; run `atoll audit` on the state directory"
            )
