"""The ledger's tables as SQLAlchemy Core sees them: a column for each field of a record.

What statements are built from, and what `migrations` makes; a test compares this with the tables
that a database tells of.
"""

from dataclasses import fields
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_type_hints

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    select,
)
from sqlalchemy.types import TypeEngine

from atoll.ledger.records import (
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    GenerationRecord,
    LeaseRecord,
    ManifestRecord,
    RoundRecord,
    RunRecord,
    SnapshotRecord,
    WorkerRecord,
)

# PostgreSQL sorts text by the database's locale unless told otherwise. The order of worker_id is
# the order of the fold, so it has to be by code point everywhere, as SQLite and Python sort.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")
# Every other type is stored as text; `rows` says how.
_STORED: dict[type, type[TypeEngine[Any]]] = {
    int: BigInteger,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
}
# What a field of this name refers to, in every table but that one.
_REFERENCES = {
    "manifest_sha256": "manifests.sha256",
    "worker_id": "workers.worker_id",
    "round": "rounds.round",
    "applied": "rounds.round",
}

metadata = MetaData()


def _of(record: type, name: str, key: tuple[str, ...], *rules: str, unique: str = "") -> Table:
    """The table whose rows are records of this type; a field that may be None may be NULL.

    `rules` are checked by the database in every row, and so is that a state is one of its enum.
    """
    columns: list[Column[Any]] = []
    checks = [CheckConstraint(rule) for rule in rules]
    hints = get_type_hints(record)
    for field in (each.name for each in fields(record)):
        hint = hints[field]
        may_be_none = isinstance(hint, UnionType)
        kind = get_args(hint)[0] if may_be_none else hint
        target = _REFERENCES.get(field, f"{name}.{field}")
        columns.append(
            Column(
                field,
                _STORED.get(kind, TEXT),
                *([] if target == f"{name}.{field}" else [ForeignKey(target)]),
                primary_key=field in key,
                autoincrement=False,
                nullable=may_be_none,
                unique=field == unique or None,
            )
        )
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            checks.append(CheckConstraint(f"{field} IN {tuple(state.value for state in kind)}"))
    return Table(name, metadata, *columns, *checks)


schema_version = Table(
    "schema_version",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
)
runs = _of(RunRecord, "runs", ("run_id",))
manifests = _of(ManifestRecord, "manifests", ("version",), unique="sha256")
workers = _of(WorkerRecord, "workers", ("worker_id",))
generations = _of(GenerationRecord, "generations", ("number",))
rounds = _of(RoundRecord, "rounds", ("round",))
datasets = _of(DatasetRecord, "datasets", ("dataset_id",))
snapshots = _of(SnapshotRecord, "snapshots", ("version",))
evaluations = _of(EvaluationRecord, "evaluations", ("version", "worker_id"))
contributions = _of(
    ContributionRecord,
    "contributions",
    ("round", "worker_id"),
    "first <= round AND round <= applied",
)
contributions_by_applied = Index("contributions_by_applied", contributions.c.applied)
leases = _of(
    LeaseRecord,
    "leases",
    ("round", "worker_id", "start", "dataset_id", "lease_epoch"),
    "start >= 0 AND start < stop",
)
# The end of what was issued, and who covers a unit: looked for from the newest rows on.
leases_by_stop = Index("leases_by_stop", leases.c.dataset_id, leases.c.stop)
leases_by_state = Index("leases_by_state", leases.c.state)

# Nothing but the key is required: an entry that lost a field must be read to be named and refused.
queues = Table(
    "queues",
    metadata,
    Column("name", TEXT, primary_key=True),  # dataset_id/shuffle_seed/epoch
    Column("length", BigInteger),
    Column("units", BigInteger),
    Column("unit_rows", BigInteger),
    Column("issued", LargeBinary),
    Column("done", LargeBinary),
)

# Words by their names.
credentials = Table(
    "credentials",
    metadata,
    Column("role", TEXT, primary_key=True),
    Column("sha256", TEXT, nullable=False),
)
control = Table(
    "control",
    metadata,
    Column("name", TEXT, primary_key=True),
    Column("value", TEXT, nullable=False),
)

# Every row of each table by its name, in the order of its key.
EVERY_ROW = {
    name: select(table).order_by(*table.primary_key.columns)
    for name, table in metadata.tables.items()
}
