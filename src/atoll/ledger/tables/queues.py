"""Datasets and the queues of their units.

The leases are the truth about every row; a queue's bitmaps say the same by units, written in the
same transactions, so that one shows damage in the other. An entry that is damaged is left as it is:
it is named, and the leases serve on without it.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from sqlalchemy import bindparam, func, select

from atoll.errors import DatasetMismatch, StateDamaged
from atoll.ledger import units
from atoll.ledger.connection import Row
from atoll.ledger.records import (
    DamagedQueue,
    DatasetRecord,
    LeaseRecord,
    LeaseState,
    QueueRecord,
    Queues,
    queue_name,
)
from atoll.ledger.tables import schema
from atoll.ledger.tables.table import RecordTable

_NAME = re.compile(r"([0-9a-f]{16})/(0|[1-9][0-9]{0,18})/(0|[1-9][0-9]{0,18})\Z")

_TABLE = schema.queues
_COLUMNS = tuple(column.name for column in _TABLE.columns)
_FIELDS = {"length": int, "units": int, "unit_rows": int, "issued": bytes, "done": bytes}
_QUEUES = schema.STATEMENTS[_TABLE.name]

_LEASES = schema.leases
_IN_QUEUE = (_LEASES.c.dataset_id, _LEASES.c.shuffle_seed, _LEASES.c.epoch)
_OF_DATASET, _OF_SEED, _OF_EPOCH = (c == bindparam(f"of_{c.name}") for c in _IN_QUEUE)
_REACHES = _LEASES.c.stop > bindparam("first")
_END = select(func.max(_LEASES.c.stop)).where(_OF_DATASET)
_LEASES_IN = select(_LEASES).where(_OF_DATASET, _REACHES, _OF_SEED, _OF_EPOCH)
_BEGINS_BEFORE = _LEASES.c.start < bindparam("end")
_IS_DONE = _LEASES.c.state == LeaseState.DONE.value
_DONE_SPANS = select(_LEASES.c.start, _LEASES.c.stop).where(
    _OF_DATASET, _REACHES, _BEGINS_BEFORE, _IS_DONE
)
_LEASED_QUEUES = (
    select(*_IN_QUEUE, func.min(_LEASES.c.round)).group_by(*_IN_QUEUE).order_by(*_IN_QUEUE)
)


class DatasetTable(RecordTable):
    """The datasets that rows are issued of."""

    def all(self) -> list[DatasetRecord]:
        """In dataset_id order."""
        return self._all(DatasetRecord)

    def add(self, records: Sequence[DatasetRecord]) -> None:
        """Records datasets that are new; DatasetMismatch when one is known by another length."""
        known = {record.dataset_id: record for record in self.all()}
        for record in records:
            held = known.get(record.dataset_id)
            if held is None:
                self._add(record)
            elif held.length != record.length:
                name = f"dataset {record.dataset_id!r} ({record.name})"
                found = f"{name} has {record.length} rows here and {held.length} in the ledger"
                rule = "a dataset keeps its length, so restore the data, or start a new run with it"
                raise DatasetMismatch(f"{found}; {rule} in another directory")

    def cursors(self) -> dict[str, int]:
        """By dataset_id the first position that was never leased; only where any was."""
        # One look at the end of an index for each, however many leases there are.
        names = [record.dataset_id for record in self.all()]
        ends = {name: self._connection.value(_END, {"of_dataset_id": name}) for name in names}
        return {name: int(stop) for name, stop in ends.items() if stop is not None}


@dataclass
class QueueTable(RecordTable):
    """The units of every epoch of every dataset, and what became of them."""

    _datasets: DatasetTable

    def all(self) -> Queues:
        """Every queue entry: the sound ones, and by name and reason those that are damaged."""
        lengths = self._lengths()
        sound: list[QueueRecord] = []
        damaged: list[DamagedQueue] = []
        for row in self._connection.rows(_QUEUES.all):
            try:
                sound.append(parse(row, lengths=lengths))
            except StateDamaged as exc:
                damaged.append(DamagedQueue(str(row[0])[:200], str(exc)))
        sound.sort(key=attrgetter("dataset_id", "shuffle_seed", "epoch"))
        return Queues(tuple(sound), tuple(damaged))

    def open(self, records: Sequence[QueueRecord]) -> None:
        """Makes the queues that are not there yet; those that are keep their cut.

        One whose entry was lost is made again from its leases, so that no unit is new twice.
        """
        for record in records:
            if not self._connection.row(_QUEUES.find, {"of_name": record.name}):
                made = _as_leased(record, self._leases_in(record))
                entry = {column: getattr(made, column) for column in _COLUMNS}
                self._connection.change(_QUEUES.insert, entry)

    def without_entry(self) -> list[tuple[str, int, int, int]]:
        """Queues that leases lie in and that have no entry: dataset_id, shuffle_seed, epoch, and
        the first round that issued rows of it.
        """
        known = {name for name, *_ in self._connection.rows(_QUEUES.all)}
        leased = self._connection.rows(_LEASED_QUEUES)
        return [(*queue, first) for *queue, first in leased if queue_name(*queue) not in known]

    def rebuild(self) -> None:
        """Computes every queue again after leases were removed; one without leases is removed."""
        for queue in self.all().sound:
            leases = self._leases_in(queue)
            if leases:
                self._write(_as_leased(queue if queue.length else replace(queue, units=0), leases))
            else:
                self._connection.change(_QUEUES.delete, {"of_name": queue.name})

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
                done = units.with_bits(done, touched[1:-1])
                for unit in {touched.start, touched.stop - 1}:
                    if self._is_whole(queue, unit):
                        done = units.with_bits(done, range(unit, unit + 1))
            self._write(replace(queue, done=done))

    def _is_whole(self, queue: QueueRecord, unit: int) -> bool:
        start, stop = queue.cut.span(unit)
        inside = {"of_dataset_id": queue.dataset_id, "first": start, "end": stop}
        found = self._connection.rows(_DONE_SPANS, inside)
        return sum(min(int(b), stop) - max(int(a), start) for a, b in found) == stop - start

    def _lengths(self) -> dict[str, int]:
        return {record.dataset_id: record.length for record in self._datasets.all()}

    def _leases_in(self, queue: QueueRecord) -> list[LeaseRecord]:
        inside = {f"of_{column.name}": getattr(queue, column.name) for column in _IN_QUEUE}
        return self._records(LeaseRecord, _LEASES_IN, {"first": queue.cut.first, **inside})

    def _by_queue(
        self, leases: Sequence[LeaseRecord]
    ) -> list[tuple[QueueRecord, list[LeaseRecord]]]:
        """Each queue with those of `leases` in it; damaged and missing entries are left out."""
        lengths = self._lengths()
        name_of = attrgetter("queue")
        found = []
        for name, group in groupby(sorted(leases, key=name_of), key=name_of):
            row = self._connection.row(_QUEUES.find, {"of_name": name})
            if row is not None:
                with suppress(StateDamaged):
                    found.append((parse(row, lengths=lengths), list(group)))
        return found

    def _write(self, queue: QueueRecord) -> None:
        values = {"units": queue.units, "issued": queue.issued, "done": queue.done}
        self._connection.change(_QUEUES.update, {"of_name": queue.name, **values})


def parse(row: Row, *, lengths: Mapping[str, int]) -> QueueRecord:
    """The queue in a row of the table; StateDamaged, with the reason, when it cannot be one."""
    entry = dict(zip(_COLUMNS, row, strict=True))
    name = str(entry.pop("name"))
    refused = f"queue entry {name[:200]!r} is refused"
    found = _NAME.match(name)
    if found is None:
        raise StateDamaged(f"{refused}: its key is not dataset_id/shuffle_seed/epoch")
    for field, kind in _FIELDS.items():
        if not isinstance(entry[field], kind):
            raise StateDamaged(f"{refused}: its field {field!r} is missing or no {kind.__name__}")
    queue = QueueRecord(found[1], int(found[2]), int(found[3]), **entry)
    flaw = _flaw(queue, lengths.get(queue.dataset_id))
    if flaw is not None:
        raise StateDamaged(f"{refused}: {flaw}")
    return queue


def _flaw(queue: QueueRecord, length: int | None) -> str | None:
    """What is wrong with the fields of a queue whose dataset has this length, if anything."""
    if length is None:
        return "its dataset is not in the ledger"
    if queue.length != length:
        return f"its length={queue.length} is not its dataset's {length}"
    if length and not (1 <= queue.units <= length and queue.unit_rows == 0):
        return f"units={queue.units} do not cut an epoch of {length} rows"
    if not length and not (queue.units >= 0 and queue.unit_rows >= 1 and queue.epoch == 0):
        return f"unit_rows={queue.unit_rows} do not cut a stream"
    for field, bitmap in (("issued", queue.issued), ("done", queue.done)):
        if len(bitmap) != units.bitmap_bytes(queue.units) or units.last_bit(bitmap) >= queue.units:
            return f"its bitmap {field!r} of {len(bitmap)} bytes is not one of {queue.units} units"
    return None


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
