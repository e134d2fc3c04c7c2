"""Records <-> rows: the one place that knows how a field is stored."""

import json
import math
from enum import StrEnum
from typing import Any, TypeAlias

from sqlalchemy import Row

from atoll import canonical
from atoll.errors import StoreError
from atoll.ledger.records import (
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    GenerationRecord,
    LeaseRecord,
    LeaseState,
    ManifestRecord,
    MemberRecord,
    Published,
    RoundRecord,
    RoundState,
    RunRecord,
    SnapshotRecord,
    WorkerRecord,
)

Record: TypeAlias = (
    RunRecord
    | ManifestRecord
    | WorkerRecord
    | LeaseRecord
    | ContributionRecord
    | DatasetRecord
    | RoundRecord
    | Published
    | SnapshotRecord
    | EvaluationRecord
)


def values(record: Record) -> dict[str, object]:
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


def run(row: Row[Any]) -> RunRecord:
    """The run in `row`."""
    return RunRecord(**row._asdict())


def manifest(row: Row[Any]) -> ManifestRecord:
    """The manifest in `row`."""
    return ManifestRecord(**row._asdict())


def worker(row: Row[Any]) -> WorkerRecord:
    """The worker in `row`."""
    return WorkerRecord(**row._asdict())


def round_(row: Row[Any]) -> RoundRecord:
    """The round in `row`."""
    return RoundRecord(**{**row._asdict(), "state": RoundState(row.state)})


def generation(row: Row[Any]) -> GenerationRecord:
    """The generation in `row`."""
    members = tuple(MemberRecord(**member) for member in json.loads(row.members))
    return GenerationRecord(row.number, row.created_wall, members)


def lease(row: Row[Any]) -> LeaseRecord:
    """The lease in `row`."""
    return LeaseRecord(**{**row._asdict(), "state": LeaseState(row.state)})


def contribution(row: Row[Any]) -> ContributionRecord:
    """The contribution in `row`."""
    return ContributionRecord(**row._asdict())


def snapshot(row: Row[Any]) -> SnapshotRecord:
    """The snapshot in `row`."""
    slots = tuple((str(name), str(blob)) for name, blob in json.loads(row.slots_sha256))
    return SnapshotRecord(**{**row._asdict(), "slots_sha256": slots})


def evaluation(row: Row[Any]) -> EvaluationRecord:
    """The evaluation in `row`."""
    return EvaluationRecord(**row._asdict())
