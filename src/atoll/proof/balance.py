"""The balance of rows: of every row of every epoch, how often it is in an accepted contribution.

Pure functions of leases and queues. Finds; the audit says what it means.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from atoll.ledger import units
from atoll.ledger.records import DatasetRecord, LeaseRecord, LeaseState, QueueRecord, Queues
from atoll.rows import RowRange

Span = tuple[int, int]


@dataclass(frozen=True)
class EpochBalance:
    """The rows of one epoch of one dataset; for a stream, all rows issued so far."""

    dataset_id: str
    name: str
    epoch: int
    rows: int
    done_once: int
    done_twice: int  # in more than one accepted contribution
    missing: int  # in none
    open: int  # leased, reopened or not issued yet
    leased: int
    reopened: int
    unissued: int
    given_up: int  # of lost leases that the policy never issues again

    @property
    def holds(self) -> bool:
        """Whether no row counts twice and every missing one is known to be open or given up."""
        return self.done_twice == 0 and self.missing == self.open + self.given_up


def balance(leases: Iterable[LeaseRecord], datasets: Sequence[DatasetRecord]) -> list[EpochBalance]:
    """The balance of every epoch of which rows were issued, by dataset_id and epoch."""
    known = {record.dataset_id: record for record in datasets}
    grouped: dict[tuple[str, int], list[LeaseRecord]] = {}
    cursors: dict[str, int] = {}
    for lease in leases:
        grouped.setdefault((lease.dataset_id, lease.epoch), []).append(lease)
        cursors[lease.dataset_id] = max(lease.stop, cursors.get(lease.dataset_id, 0))
    return [
        _epoch(found, known.get(dataset_id), cursor=cursors[dataset_id])
        for (dataset_id, _), found in sorted(grouped.items())
    ]


def _epoch(
    leases: Sequence[LeaseRecord], dataset: DatasetRecord | None, *, cursor: int
) -> EpochBalance:
    epoch = leases[0].epoch
    length = 0 if dataset is None else dataset.length
    first = epoch * length
    last = first + length if length else cursor
    by_state = {
        state: [(lease.start, lease.stop) for lease in leases if lease.state is state]
        for state in LeaseState
    }
    once, more = depths(by_state[LeaseState.DONE])
    leased, reopened, given_up = (
        sum(stop - start for start, stop in by_state[state])
        for state in (LeaseState.LEASED, LeaseState.REOPENED, LeaseState.GIVEN_UP)
    )
    unissued = max(0, last - max(first, cursor))
    return EpochBalance(
        dataset_id=leases[0].dataset_id,
        name="" if dataset is None else dataset.name,
        epoch=epoch,
        rows=last - first,
        done_once=once,
        done_twice=more,
        missing=last - first - once - more,
        open=leased + reopened + unissued,
        leased=leased,
        reopened=reopened,
        unissued=unissued,
        given_up=given_up,
    )


def depths(spans: Sequence[Span]) -> tuple[int, int]:
    """How many rows lie in exactly one of `spans`, and how many in more."""
    edges = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    once = more = depth = 0
    for (here, step), (there, _) in pairwise([*edges, (edges[-1][0] if edges else 0, 0)]):
        depth += step
        once += (there - here) * (depth == 1)
        more += (there - here) * (depth > 1)
    return once, more


def merged(ranges: Iterable[RowRange]) -> list[RowRange]:
    """The ranges in order, with neighbours that touch joined."""
    found: list[RowRange] = []
    for one in sorted(ranges):
        if found and (found[-1].dataset_id, found[-1].stop) == (one.dataset_id, one.start):
            found[-1] = replace(found[-1], stop=one.stop)
        else:
            found.append(one)
    return found


def check_queues(
    queues: Queues, leases: Iterable[LeaseRecord], datasets: Sequence[DatasetRecord]
) -> Iterator[tuple[str, str]]:
    """Every queue that is damaged or disagrees with the leases: its name, and what is wrong."""
    for entry in queues.damaged:
        yield entry.name, entry.reason
    grouped: dict[str, list[LeaseRecord]] = {}
    for lease in leases:
        grouped.setdefault(lease.queue, []).append(lease)
    known: Mapping[str, QueueRecord] = {queue.name: queue for queue in queues.sound}
    named = {record.dataset_id for record in datasets}
    for name in sorted(grouped.keys() - known.keys() - {entry.name for entry in queues.damaged}):
        if grouped[name][0].dataset_id in named:
            yield name, "leases lie in it and it has no entry"
    for name, queue in known.items():
        spans = [(x.start, x.stop, x.state is LeaseState.DONE) for x in grouped.get(name, [])]
        for field, right in zip(("issued", "done"), units.rebuilt(queue.cut, spans), strict=True):
            recorded: bytes = getattr(queue, field)
            if recorded != right:
                wrong = int.from_bytes(recorded, "little") ^ int.from_bytes(right, "little")
                unit = (wrong & -wrong).bit_length() - 1
                yield name, f"its bitmap {field!r} and the leases disagree from unit {unit} on"
