"""Datasets and the queues of their units.

The leases are the truth about every row; a queue's bitmaps say the same by units, written in the
same transactions, so that one shows damage in the other. An entry that is damaged is left as it is:
it is named, and the leases serve on without it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, update

from atoll.errors import DatasetMismatch, StateDamaged
from atoll.ledger import units
from atoll.ledger.connection import Connection, Row
from atoll.ledger.records import (
    DamagedQueue,
    DatasetRecord,
    LeaseRecord,
    LeaseState,
    QueueRecord,
    Queues,
    queue_name,
)
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.table import RecordTable

_NAME = re.compile(r"([0-9a-f]{16})/(0|[1-9][0-9]{0,18})/(0|[1-9][0-9]{0,18})\Z")

_DATASETS = select(schema.datasets).order_by(schema.datasets.c.dataset_id)
_INSERT_DATASET = insert(schema.datasets)

_TABLE = schema.queues
_COLUMNS = tuple(column.name for column in _TABLE.columns)
_FIELDS = {"length": int, "units": int, "unit_rows": int, "issued": bytes, "done": bytes}
_IS_NAMED = _TABLE.c.name == bindparam("of_name")
_QUEUES = select(_TABLE).order_by(_TABLE.c.name)
_FIND = select(_TABLE).where(_IS_NAMED)
_FIND_NAME = select(_TABLE.c.name).where(_IS_NAMED)
_INSERT = insert(_TABLE)
_UPDATE = update(_TABLE).where(_IS_NAMED)
_DELETE = delete(_TABLE).where(_IS_NAMED)

_LEASES = schema.leases
_OF_DATASET = _LEASES.c.dataset_id == bindparam("of_dataset")
_REACHES = _LEASES.c.stop > bindparam("first")
_END = select(func.max(_LEASES.c.stop)).where(_OF_DATASET)
_LEASES_IN = select(_LEASES).where(
    _OF_DATASET,
    _REACHES,
    _LEASES.c.shuffle_seed == bindparam("of_seed"),
    _LEASES.c.epoch == bindparam("of_epoch"),
)
_DONE_SPANS = select(_LEASES.c.start, _LEASES.c.stop).where(
    _OF_DATASET,
    _REACHES,
    _LEASES.c.start < bindparam("end"),
    _LEASES.c.state == LeaseState.DONE.value,
)


_NAMES = select(_TABLE.c.name)
_IN_QUEUE = (_LEASES.c.dataset_id, _LEASES.c.shuffle_seed, _LEASES.c.epoch)
_LEASED_QUEUES = (
    select(*_IN_QUEUE, func.min(_LEASES.c.round)).group_by(*_IN_QUEUE).order_by(*_IN_QUEUE)
)


class DatasetTable(RecordTable):
    """The datasets that rows are issued of."""

    def all(self) -> list[DatasetRecord]:
        """In dataset_id order."""
        return self._records(DatasetRecord, _DATASETS)

    def add(self, records: Sequence[DatasetRecord]) -> None:
        """Records datasets that are new; DatasetMismatch when one is known by another length."""
        known = {record.dataset_id: record for record in self.all()}
        for record in records:
            held = known.get(record.dataset_id)
            if held is None:
                self._connection.change(_INSERT_DATASET, rows.values(record))
            elif held.length != record.length:
                raise DatasetMismatch(
                    f"dataset {record.dataset_id!r} ({record.name}) has {record.length} rows here "
                    f"and {held.length} in the ledger; a dataset keeps its length, so restore the "
                    f"data, or start a new run with it in another directory"
                )

    def cursors(self) -> dict[str, int]:
        """By dataset_id the first position that was never leased; only where any was."""
        # One look at the end of an index for each, however many leases there are.
        ends = {
            record.dataset_id: self._connection.value(_END, {"of_dataset": record.dataset_id})
            for record in self.all()
        }
        return {dataset_id: int(stop) for dataset_id, stop in ends.items() if stop is not None}


class QueueTable(RecordTable):
    """The units of every epoch of every dataset, and what became of them."""

    def __init__(self, connection: Connection, datasets: DatasetTable) -> None:
        super().__init__(connection)
        self._datasets = datasets

    def all(self) -> Queues:
        """Every queue entry: the sound ones, and by name and reason those that are damaged."""
        lengths = self._lengths()
        sound: list[QueueRecord] = []
        damaged: list[DamagedQueue] = []
        for row in self._connection.rows(_QUEUES):
            try:
                sound.append(parse(row, lengths=lengths))
            except StateDamaged as exc:
                damaged.append(DamagedQueue(str(row[0])[:200], str(exc)))
        sound.sort(key=lambda queue: (queue.dataset_id, queue.shuffle_seed, queue.epoch))
        return Queues(tuple(sound), tuple(damaged))

    def open(self, records: Sequence[QueueRecord]) -> None:
        """Makes the queues that are not there yet; those that are keep their cut.

        One whose entry was lost is made again from its leases, so that no unit is new twice.
        """
        for record in records:
            if self._connection.row(_FIND_NAME, {"of_name": record.name}):
                continue
            made = _as_leased(record, self._leases_in(record))
            entry = {field: getattr(made, field) for field in _FIELDS}
            self._connection.change(_INSERT, {"name": made.name, **entry})

    def without_entry(self) -> list[tuple[str, int, int, int]]:
        """Queues that leases lie in and that have no entry: dataset_id, shuffle_seed, epoch, and
        the first round that issued rows of it.
        """
        known = {name for [name] in self._connection.rows(_NAMES)}
        return [
            (dataset_id, seed, epoch, first)
            for dataset_id, seed, epoch, first in self._connection.rows(_LEASED_QUEUES)
            if queue_name(dataset_id, seed, epoch) not in known
        ]

    def rebuild(self) -> None:
        """Computes every queue again after leases were removed; one without leases is removed."""
        for queue in self.all().sound:
            leases = self._leases_in(queue)
            if not leases:
                self._connection.change(_DELETE, {"of_name": queue.name})
                continue
            self._write(_as_leased(queue if queue.length else replace(queue, units=0), leases))

    def mark_issued(self, leases: Sequence[LeaseRecord]) -> None:
        """Sets the bits of every unit that the leases touch."""
        for queue, mine in self._by_queue(leases):
            grown = replace(queue, units=_needed(queue, mine))
            issued = _sized(queue.issued, grown)
            for lease in mine:
                issued = units.with_bits(issued, grown.cut.touched(lease.start, lease.stop))
            self._write(replace(grown, issued=issued, done=_sized(queue.done, grown)))

    def mark_done(self, leases: Sequence[LeaseRecord]) -> None:
        """Sets the bits of the units that are whole now; called once `leases` are done."""
        for queue, mine in self._by_queue(leases):
            done = queue.done
            for lease in mine:
                touched = queue.cut.touched(lease.start, lease.stop)
                inner = range(touched.start + 1, touched.stop - 1)
                done = units.with_bits(done, inner)
                for unit in {touched.start, touched.stop - 1}:
                    if self._is_whole(queue, unit):
                        done = units.with_bits(done, range(unit, unit + 1))
            self._write(replace(queue, done=done))

    def _is_whole(self, queue: QueueRecord, unit: int) -> bool:
        start, stop = queue.cut.span(unit)
        inside = {"of_dataset": queue.dataset_id, "first": start, "end": stop}
        found = self._connection.rows(_DONE_SPANS, inside)
        rows_done = sum(min(int(b), stop) - max(int(a), start) for a, b in found)
        return rows_done == stop - start

    def _lengths(self) -> dict[str, int]:
        return {record.dataset_id: record.length for record in self._datasets.all()}

    def _leases_in(self, queue: QueueRecord) -> list[LeaseRecord]:
        inside = {
            "of_dataset": queue.dataset_id,
            "first": queue.cut.first,
            "of_seed": queue.shuffle_seed,
            "of_epoch": queue.epoch,
        }
        return self._records(LeaseRecord, _LEASES_IN, inside)

    def _by_queue(
        self, leases: Sequence[LeaseRecord]
    ) -> list[tuple[QueueRecord, list[LeaseRecord]]]:
        """Each queue with those of `leases` in it; damaged and missing entries are left out."""
        lengths = self._lengths()
        ordered = sorted(leases, key=lambda lease: lease.queue)
        found = []
        for name, group in groupby(ordered, key=lambda lease: lease.queue):
            row = self._connection.row(_FIND, {"of_name": name})
            if row is None:
                continue
            try:
                found.append((parse(row, lengths=lengths), list(group)))
            except StateDamaged:
                continue
        return found

    def _write(self, queue: QueueRecord) -> None:
        values = {"units": queue.units, "issued": queue.issued, "done": queue.done}
        self._connection.change(_UPDATE, {"of_name": queue.name, **values})


def parse(row: Row, *, lengths: Mapping[str, int]) -> QueueRecord:
    """The queue in a row of the table; StateDamaged, with the reason, when it cannot be one."""
    entry = dict(zip(_COLUMNS, row, strict=True))
    found = _NAME.match(str(entry["name"]))
    if found is None:
        raise _damaged(entry, "its key is not dataset_id/shuffle_seed/epoch")
    for field, kind in _FIELDS.items():
        if not isinstance(entry[field], kind):
            raise _damaged(entry, f"its field {field!r} is missing or no {kind.__name__}")
    fields = {name: entry[name] for name in _FIELDS}
    queue = QueueRecord(found[1], int(found[2]), int(found[3]), **fields)
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


def _as_leased(queue: QueueRecord, leases: Sequence[LeaseRecord]) -> QueueRecord:
    """The queue with the bitmaps that follow from its leases, and long enough for them."""
    grown = replace(queue, units=_needed(queue, leases))
    spans = [(lease.start, lease.stop, lease.state is LeaseState.DONE) for lease in leases]
    issued, done = units.rebuilt(grown.cut, spans)
    return replace(grown, issued=issued, done=done)


def _needed(queue: QueueRecord, leases: Sequence[LeaseRecord]) -> int:
    """How many units a queue has when these leases are issued; only a stream's number grows."""
    if queue.length:
        return queue.units
    return max([queue.units, *(queue.cut.unit(lease.stop - 1) + 1 for lease in leases)])


def _sized(bitmap: bytes, queue: QueueRecord) -> bytes:
    return bitmap.ljust(units.bitmap_bytes(queue.units), b"\0")
