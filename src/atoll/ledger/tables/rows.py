"""Records <-> rows: the one place that knows how a field is stored.

A record has the fields of its table's columns, in their order; a test holds them together.
"""

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING

from atoll import canonical
from atoll.errors import StoreError
from atoll.ledger.connection import Row
from atoll.ledger.records import (
    GenerationRecord,
    LeaseRecord,
    LeaseState,
    MemberRecord,
    RoundRecord,
    RoundState,
    SnapshotRecord,
    WorkerRecord,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def values(record: "DataclassInstance") -> dict[str, object]:
    """The columns of `record`; StoreError for a number that not every engine can keep."""
    return {name: _stored(name, getattr(record, name)) for name in record.__dataclass_fields__}


def _stored(name: str, value: object) -> object:
    if isinstance(value, float):
        return _storable(name, value)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    return value


def generation_values(record: GenerationRecord) -> dict[str, object]:
    """The columns of a generation; its members are one text."""
    members = [
        {name: getattr(member, name) for name in member.__dataclass_fields__}
        for member in record.members
    ]
    return {
        "number": record.number,
        "created_wall": _storable("created_wall", record.created_wall),
        "members": canonical.dumps(members),
    }


def _storable(name: str, value: float) -> float:
    # SQLite keeps NaN as NULL.
    if not math.isfinite(value):
        raise StoreError(f"{name}={value!r} must be finite to be recorded")
    # SQLite keeps -0.0 as 0; adding 0.0 makes the engines agree and changes no other value.
    return value + 0.0


def worker(row: Row) -> WorkerRecord:
    """The worker in `row`."""
    worker_id, key_sha256, incarnation, active, wall = row
    return WorkerRecord(worker_id, key_sha256, incarnation, bool(active), wall)


def round_(row: Row) -> RoundRecord:
    """The round in `row`."""
    number, state, *rest = row
    return RoundRecord(number, RoundState(state), *rest)


def generation(row: Row) -> GenerationRecord:
    """The generation in `row`."""
    number, wall, members = row
    return GenerationRecord(
        number, wall, tuple(MemberRecord(**member) for member in json.loads(members))
    )


def lease(row: Row) -> LeaseRecord:
    """The lease in `row`."""
    number, worker_id, start, stop, state, *rest = row
    return LeaseRecord(number, worker_id, start, stop, LeaseState(state), *rest)


def snapshot(row: Row) -> SnapshotRecord:
    """The snapshot in `row`."""
    version, master, published, slots = row
    named = tuple((str(name), str(blob)) for name, blob in json.loads(slots))
    return SnapshotRecord(version, master, published, named)
