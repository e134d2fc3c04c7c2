"""The queues as an operator sees them; reads the ledger, changes nothing."""

from collections.abc import Sequence, Set
from itertools import groupby

from atoll.data.parts import Part
from atoll.ledger import units
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import DatasetRecord, LeaseState, QueueRecord, RowCount
from atoll.protocol.manifest import WorkSettings
from atoll.protocol.work import MAX_QUEUES, DamagedEntry, Dataset, Queue, Work, WorkerRows


def work(
    ledger: Ledger, parts: Sequence[Part], settings: WorkSettings, *, expired_leases: int
) -> Work:
    """Every dataset, its newest queues with their bitmaps, and who has which rows."""
    with ledger.reading() as t:
        found, rows = t.queues.all(), t.leases.counts()
        cursors, datasets = t.datasets.cursors(), t.datasets.all()
    current = {part.dataset_id for part in parts}
    newest = _newest(found.sound, current)
    counts = {
        key: list(group) for key, group in groupby(rows, key=lambda c: (c.dataset_id, c.epoch))
    }

    def dataset(record: DatasetRecord) -> Dataset:
        name, cursor = record.dataset_id, cursors.get(record.dataset_id, 0)
        epoch = cursor // record.length if record.length else 0
        cut = units.units_of(record.length, settings.units)
        new = QueueRecord(name, 0, epoch, record.length, cut, settings.stream_unit_rows)
        mine = [q for q in found.sound if (q.dataset_id, q.epoch) == (name, epoch)]
        return Dataset(
            dataset_id=name,
            name=record.name,
            length=record.length,
            weight=record.weight,
            current=name in current,
            rows_issued=cursor,
            epoch=epoch,
            next_unit=(mine or [new])[0].cut.unit(cursor),
        )

    return Work(
        policy=settings.policy,
        lease_seconds=settings.lease_seconds,
        datasets=tuple(map(dataset, datasets)),
        queues=tuple(_queue(q, counts.get((q.dataset_id, q.epoch), [])) for q in newest),
        left_off=len(found.sound) - len(newest),
        damaged=tuple(DamagedEntry(name=d.name, reason=d.reason) for d in found.damaged),
        expired_leases=expired_leases,
    )


def _newest(queues: Sequence[QueueRecord], current: Set[str]) -> list[QueueRecord]:
    """The newest epochs of each dataset, in order: a short one must not crowd the others out."""
    last = {queue.dataset_id: queue.epoch for queue in sorted(queues, key=lambda q: q.epoch)}
    found = sorted(
        queues,
        key=lambda q: (q.dataset_id not in current, last[q.dataset_id] - q.epoch, q.dataset_id),
    )[:MAX_QUEUES]
    return sorted(found, key=lambda queue: (queue.dataset_id, queue.epoch))


def _queue(queue: QueueRecord, counts: Sequence[RowCount]) -> Queue:
    total = {state: sum(c.rows for c in counts if c.state is state) for state in LeaseState}
    return Queue(
        dataset_id=queue.dataset_id,
        shuffle_seed=queue.shuffle_seed,
        epoch=queue.epoch,
        length=queue.length,
        units=queue.units,
        unit_rows=queue.unit_rows,
        units_issued=units.count_bits(queue.issued),
        units_done=units.count_bits(queue.done),
        issued=queue.issued.hex(),
        done=queue.done.hex(),
        rows_done=total[LeaseState.DONE],
        rows_leased=total[LeaseState.LEASED],
        rows_open=total[LeaseState.REOPENED],
        rows_given_up=total[LeaseState.GIVEN_UP],
        workers=tuple(
            _worker(worker_id, list(group))
            for worker_id, group in groupby(counts, key=lambda count: count.worker_id)
        ),
    )


def _worker(worker_id: str, counts: Sequence[RowCount]) -> WorkerRows:
    rows = {count.state: count.rows for count in counts}
    return WorkerRows(
        worker_id=worker_id,
        done=rows.get(LeaseState.DONE, 0),
        leased=rows.get(LeaseState.LEASED, 0),
        reopened=rows.get(LeaseState.REOPENED, 0) + rows.get(LeaseState.TAKEN, 0),
        given_up=rows.get(LeaseState.GIVEN_UP, 0),
    )
