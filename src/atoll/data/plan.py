"""Which rows each worker trains in one round: a pure function of the ledger's state.

Owns the arithmetic only: it knows no ledger, no lease and no time. Positions count a dataset's
endless row sequence, epoch after epoch; `shuffle` says which row of the dataset a position is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError, StateDamaged
from atoll.rows import RowRange

MAX_EPOCHS = 512  # in one worker's round: each is a lease, and a range in a header of 64 KiB


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset that rows are planned of."""

    dataset_id: str
    length: int  # rows of an epoch; 0: a stream
    weight: int
    cursor: int  # its first position that no plan has used


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one round: reopened ones, and fresh ones that moved the cursors.

    Rows in `ranges` = rows in `taken` - rows in `left` + fresh rows before the new `cursors`.
    """

    # By worker_id, in worker_id order; each worker's by dataset_id and start.
    ranges: dict[str, tuple[RowRange, ...]]
    cursors: dict[str, int]  # by dataset_id
    # Reopened ranges of which rows were given out, as they were passed in.
    taken: tuple[RowRange, ...]
    left: tuple[RowRange, ...]  # the rest of the last taken range, if it was not needed whole


def plan(
    wanted: Mapping[str, int], *, sources: Sequence[Source], reopened: Sequence[RowRange]
) -> Plan:
    """Gives each worker exactly the rows that `wanted` says: reopened ones first, then fresh ones.

    Fresh rows come from all sources, so that what was ever given of each follows the weights.
    Workers are served in worker_id order, reopened ranges in the order of the sources and of rows,
    so the result does not depend on the order of the other arguments. A fresh range ends where its
    epoch does. Ranges of a dataset that is no source are left alone. Reopened ranges that overlap
    or reach beyond their cursor would train a row twice: StateDamaged.
    """
    for worker, rows in wanted.items():
        if rows < 1:
            raise ConfigError(
                f"{rows!r} rows for worker_id {worker!r} are below 1; raise sync_every or batch"
            )
    cursors = {source.dataset_id: source.cursor for source in sources}
    waiting = _in_order(reopened, sources)
    taken: list[RowRange] = []
    part: RowRange | None = None  # what remains of the last taken range
    ranges: dict[str, tuple[RowRange, ...]] = {}
    for worker in sorted(wanted):
        mine: list[RowRange] = []
        missing = wanted[worker]
        while missing and (part or waiting):
            if part is None:
                part = waiting.pop(0)
                taken.append(part)
            stop = min(part.start + missing, part.stop)
            mine.append(RowRange(part.dataset_id, part.start, stop))
            part = RowRange(part.dataset_id, stop, part.stop) if stop < part.stop else None
            missing -= len(mine[-1])
        for source, rows in zip(sources, shares(sources, cursors, missing), strict=True):
            start = cursors[source.dataset_id]
            mine += _epochs(source, start, start + rows)
            cursors[source.dataset_id] = start + rows
        ranges[worker] = tuple(sorted(mine))
    return Plan(ranges, cursors, tuple(taken), (part,) if part else ())


def check_epochs(sources: Sequence[Source], *, rows_each: int) -> None:
    """ConfigError when a worker's rows of one round lie in more epochs than a frame can name."""
    whole = sum(source.weight for source in sources)
    found = [
        (rows_each * source.weight // whole // source.length, source.length)
        for source in sources
        if source.length
    ]
    total = sum(epochs for epochs, _ in found)
    if total > MAX_EPOCHS:
        epochs, length = max(found)
        raise ConfigError(
            f"sync_every * inner.batch = {rows_each} rows of an island in a round are {epochs} "
            f"epochs of a dataset of {length} rows; its frame names each, so {MAX_EPOCHS} is the "
            f"most: lower sync_every or inner.batch, or give more data"
        )


def shares(sources: Sequence[Source], given: Mapping[str, int], rows: int) -> list[int]:
    """How `rows` more rows are split so that all that was given follows the weights, exactly.

    Each source gets what it lacks of its share of the total, in whole rows, the one that lacks most
    first; what whole rows leave over goes row by row to the largest deficit, the earlier source on
    a tie. A deficit is weight * total - (sum of weights) * given, so all of it is integers.
    """
    if not rows:
        return [0] * len(sources)
    whole = sum(source.weight for source in sources)
    total = sum(given[source.dataset_id] for source in sources) + rows
    lacks = [source.weight * total - whole * given[source.dataset_id] for source in sources]
    order = sorted(range(len(sources)), key=lambda i: (-lacks[i], i))
    found = [0] * len(sources)
    left = rows
    for i in order:
        found[i] = min(left, max(0, lacks[i]) // whole)
        left -= found[i]
    while left:
        i = max(range(len(sources)), key=lambda i: (lacks[i] - whole * found[i], -i))
        found[i] += 1
        left -= 1
    return found


def _epochs(source: Source, start: int, stop: int) -> Iterator[RowRange]:
    """`[start, stop)` cut at the ends of epochs."""
    while start < stop:
        end = stop
        if source.length:
            end = min(stop, (start // source.length + 1) * source.length)
        yield RowRange(source.dataset_id, start, end)
        start = end


def _in_order(reopened: Sequence[RowRange], sources: Sequence[Source]) -> list[RowRange]:
    """The reopened ranges of the sources, each row in one of them alone; else StateDamaged."""
    waiting: list[RowRange] = []
    for source in sources:
        mine = sorted(r for r in reopened if r.dataset_id == source.dataset_id)
        limits = [*((r.start, "the next range") for r in mine[1:]), (source.cursor, "the cursor")]
        for one, (limit, name) in zip(mine, limits, strict=False):
            if one.stop > limit:
                raise StateDamaged(
                    f"reopened rows [{one.start}, {one.stop}) reach past {name} at {limit}; a row "
                    f"is given out once at a time; run `atoll audit` on the state directory"
                )
        waiting += mine
    return waiting
