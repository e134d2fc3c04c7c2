"""Statements about datasets and the queues of their units.

The leases are the truth about every row; a queue's bitmaps say the same by units, written in the
same transactions, so that one shows damage in the other. An entry that is damaged is left as it is:
it is named, and the leases serve on without it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from atoll.errors import DatasetMismatch, StateDamaged
from atoll.ledger import rows, schema, units
from atoll.ledger.records import (
    DamagedQueue,
    DatasetRecord,
    LeaseRecord,
    LeaseState,
    QueueRecord,
    Queues,
    RowCount,
)

_NAME = re.compile(r"([0-9a-f]{16})/(0|[1-9][0-9]{0,18})/(0|[1-9][0-9]{0,18})\Z")


# Datasets


def add_datasets(connection: Connection, records: Sequence[DatasetRecord]) -> None:
    """See `Ledger.add_datasets`."""
    known = {record.dataset_id: record for record in datasets(connection)}
    for record in records:
        held = known.get(record.dataset_id)
        if held is None:
            connection.execute(insert(schema.datasets), rows.values(record))
        elif held.length != record.length:
            raise DatasetMismatch(
                f"dataset {record.dataset_id!r} ({record.name}) has {record.length} rows here and "
                f"{held.length} in the ledger; a dataset keeps its length, so restore the data, "
                f"or start a new run with it in another directory"
            )


def datasets(connection: Connection) -> list[DatasetRecord]:
    """See `Ledger.datasets`."""
    table = schema.datasets
    statement = select(table).order_by(table.c.dataset_id)
    return [DatasetRecord(**row._asdict()) for row in connection.execute(statement)]


def cursors(connection: Connection) -> dict[str, int]:
    """See `Ledger.cursors`."""
    table = schema.leases
    ends = {
        # One look at the end of an index for each, however many leases there are.
        record.dataset_id: connection.execute(
            select(func.max(table.c.stop)).where(table.c.dataset_id == record.dataset_id)
        ).scalar_one()
        for record in datasets(connection)
    }
    return {dataset_id: int(stop) for dataset_id, stop in ends.items() if stop is not None}


def row_counts(connection: Connection) -> list[RowCount]:
    """See `Ledger.row_counts`."""
    table = schema.leases
    key = (table.c.dataset_id, table.c.epoch, table.c.worker_id, table.c.state)
    statement = select(*key, func.sum(table.c.stop - table.c.start)).group_by(*key).order_by(*key)
    return [
        RowCount(dataset_id, epoch, worker_id, LeaseState(state), int(count))
        for dataset_id, epoch, worker_id, state, count in connection.execute(statement)
    ]


# Queues


def read(connection: Connection) -> Queues:
    """See `Ledger.queues`."""
    lengths = {record.dataset_id: record.length for record in datasets(connection)}
    sound: list[QueueRecord] = []
    damaged: list[DamagedQueue] = []
    for row in connection.execute(select(schema.queues).order_by(schema.queues.c.name)):
        try:
            sound.append(parse(row._asdict(), lengths=lengths))
        except StateDamaged as exc:
            damaged.append(DamagedQueue(str(row.name)[:200], str(exc)))
    sound.sort(key=lambda queue: (queue.dataset_id, queue.shuffle_seed, queue.epoch))
    return Queues(tuple(sound), tuple(damaged))


def parse(entry: Mapping[str, Any], *, lengths: Mapping[str, int]) -> QueueRecord:
    """The queue in a row of the table; StateDamaged says what it cannot be."""
    found = _NAME.match(str(entry["name"]))
    if found is None:
        raise _damaged(entry, "its key is not dataset_id/shuffle_seed/epoch")
    for field in ("length", "units", "unit_rows", "issued", "done"):
        kind = bytes if field in ("issued", "done") else int
        if not isinstance(entry[field], kind):
            raise _damaged(entry, f"its field {field!r} is missing or no {kind.__name__}")
    queue = QueueRecord(
        found[1],
        int(found[2]),
        int(found[3]),
        **{name: entry[name] for name in ("length", "units", "unit_rows", "issued", "done")},
    )
    _check(queue, entry, lengths)
    return queue


def _check(queue: QueueRecord, entry: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    length = lengths.get(queue.dataset_id)
    if length is None:
        raise _damaged(entry, "its dataset is not in the ledger")
    if queue.length != length:
        raise _damaged(entry, f"its length={queue.length} is not its dataset's {length}")
    if length and not (1 <= queue.units <= length and queue.unit_rows == 0):
        raise _damaged(entry, f"units={queue.units} do not cut an epoch of {length} rows")
    if not length and not (queue.units >= 0 and queue.unit_rows >= 1 and queue.epoch == 0):
        raise _damaged(entry, f"unit_rows={queue.unit_rows} do not cut a stream")
    for field, bitmap in (("issued", queue.issued), ("done", queue.done)):
        if len(bitmap) != units.bitmap_bytes(queue.units) or units.last_bit(bitmap) >= queue.units:
            raise _damaged(
                entry,
                f"its bitmap {field!r} of {len(bitmap)} bytes is not one of {queue.units} units",
            )


def _damaged(entry: Mapping[str, Any], reason: str) -> StateDamaged:
    return StateDamaged(f"queue entry {str(entry['name'])[:200]!r} is refused: {reason}")


def open_queues(connection: Connection, records: Sequence[QueueRecord]) -> None:
    """Makes the queues that are not there yet; those that are keep their cut.

    One whose entry was lost is made again from its leases, so that no unit is new twice.
    """
    table = schema.queues
    for record in records:
        if connection.execute(select(table.c.name).where(table.c.name == record.name)).first():
            continue
        leases = _leases_in(connection, record)
        made = replace(record, units=_needed(record, leases))
        issued, done = units.rebuilt(made.cut, _spans(leases))
        connection.execute(
            insert(table),
            {
                "name": made.name,
                "length": made.length,
                "units": made.units,
                "unit_rows": made.unit_rows,
                "issued": issued,
                "done": done,
            },
        )


def rebuild(connection: Connection) -> None:
    """Every queue as its leases say, after some of them went; one without any goes too."""
    table = schema.queues
    for queue in read(connection).sound:
        leases = _leases_in(connection, queue)
        if not leases:
            connection.execute(delete(table).where(table.c.name == queue.name))
            continue
        units_left = queue.units if queue.length else _needed(replace(queue, units=0), leases)
        kept = replace(queue, units=units_left)
        issued, done = units.rebuilt(kept.cut, _spans(leases))
        _write(connection, replace(kept, issued=issued, done=done))


def add_missing(connection: Connection, *, units_wanted: int, stream_unit_rows: int) -> None:
    """Makes every queue that leases lie in and that has no entry, cut as a new one would be."""
    table = schema.leases
    key = (table.c.dataset_id, table.c.shuffle_seed, table.c.epoch)
    lengths = {record.dataset_id: record.length for record in datasets(connection)}
    found = [
        QueueRecord(
            dataset_id,
            shuffle_seed,
            epoch,
            length,
            units.units_of(length, units_wanted),
            0 if length else stream_unit_rows,
        )
        for dataset_id, shuffle_seed, epoch in connection.execute(select(*key).distinct())
        if (length := lengths.get(dataset_id)) is not None
    ]
    open_queues(connection, found)


def _spans(leases: Sequence[LeaseRecord]) -> list[tuple[int, int, bool]]:
    return [(lease.start, lease.stop, lease.state is LeaseState.DONE) for lease in leases]


def _leases_in(connection: Connection, queue: QueueRecord) -> list[LeaseRecord]:
    table = schema.leases
    statement = select(table).where(
        table.c.dataset_id == queue.dataset_id,
        table.c.stop > queue.cut.first,
        table.c.shuffle_seed == queue.shuffle_seed,
        table.c.epoch == queue.epoch,
    )
    return [rows.lease(row) for row in connection.execute(statement)]


def mark_issued(connection: Connection, leases: Sequence[LeaseRecord]) -> None:
    """Sets the bits of every unit that the leases touch."""
    for queue, mine in _by_queue(connection, leases):
        grown = replace(queue, units=_needed(queue, mine))
        issued = _sized(queue.issued, grown)
        for lease in mine:
            issued = units.with_bits(issued, grown.cut.touched(lease.start, lease.stop))
        _write(connection, replace(grown, issued=issued, done=_sized(queue.done, grown)))


def mark_done(connection: Connection, leases: Sequence[LeaseRecord]) -> None:
    """Sets the bits of the units that are whole now; called once `leases` are in state `done`."""
    for queue, mine in _by_queue(connection, leases):
        done = queue.done
        for lease in mine:
            touched = queue.cut.touched(lease.start, lease.stop)
            inner = range(touched.start + 1, touched.stop - 1)
            done = units.with_bits(done, inner)
            for unit in {touched.start, touched.stop - 1}:
                if _is_whole(connection, queue, unit):
                    done = units.with_bits(done, range(unit, unit + 1))
        _write(connection, replace(queue, done=done))


def _is_whole(connection: Connection, queue: QueueRecord, unit: int) -> bool:
    start, stop = queue.cut.span(unit)
    table = schema.leases
    found = connection.execute(
        select(table.c.start, table.c.stop).where(
            table.c.dataset_id == queue.dataset_id,
            table.c.stop > start,
            table.c.start < stop,
            table.c.state == LeaseState.DONE.value,
        )
    )
    rows_done = sum(min(int(b), stop) - max(int(a), start) for a, b in found)
    return rows_done == stop - start


def _needed(queue: QueueRecord, leases: Sequence[LeaseRecord]) -> int:
    """How many units a queue has when these leases are issued; only a stream's number grows."""
    if queue.length:
        return queue.units
    return max([queue.units, *(queue.cut.unit(lease.stop - 1) + 1 for lease in leases)])


def _sized(bitmap: bytes, queue: QueueRecord) -> bytes:
    return bitmap.ljust(units.bitmap_bytes(queue.units), b"\0")


def _by_queue(
    connection: Connection, leases: Sequence[LeaseRecord]
) -> list[tuple[QueueRecord, list[LeaseRecord]]]:
    """The leases by their queue, without those whose entry is damaged or not there."""
    lengths = {record.dataset_id: record.length for record in datasets(connection)}
    ordered = sorted(leases, key=lambda lease: lease.queue)
    found = []
    for name, group in groupby(ordered, key=lambda lease: lease.queue):
        row = _row(connection, name)
        if row is None:
            continue
        try:
            found.append((parse(row._asdict(), lengths=lengths), list(group)))
        except StateDamaged:
            continue
    return found


def _row(connection: Connection, name: str) -> Row[Any] | None:
    table = schema.queues
    return connection.execute(select(table).where(table.c.name == name)).one_or_none()


def _write(connection: Connection, queue: QueueRecord) -> None:
    table = schema.queues
    connection.execute(
        update(table)
        .where(table.c.name == queue.name)
        .values(units=queue.units, issued=queue.issued, done=queue.done)
    )
