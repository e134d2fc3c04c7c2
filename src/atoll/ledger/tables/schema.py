"""The ledger's tables as SQLAlchemy Core sees them: a column for each field of a record.

What statements are built from, and what `migrations` makes; a test compares this with the tables
that a database tells of.
"""

from dataclasses import fields
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_type_hints

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from atoll.ledger import records

# PostgreSQL sorts text by the database's locale unless told otherwise. The order of worker_id is
# the order of the fold, so it has to be by code point everywhere, as SQLite and Python sort.
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
# Every other type is stored as text; `rows` says how.
_STORED: dict[type, type[TypeEngine[Any]]] = {
    int: sa.BigInteger,
    float: sa.Double,
    bool: sa.Boolean,
    bytes: sa.LargeBinary,
}
# What a field of this name refers to, in every table but that one.
_REFERENCES = {
    "manifest_sha256": "manifests.sha256",
    "worker_id": "workers.worker_id",
    "round": "rounds.round",
    "applied": "rounds.round",
}

metadata = sa.MetaData()
NAMES: dict[type, str] = {}  # of the table by the record that a row of it is


def _of(record: type, name: str, key: tuple[str, ...], *rules: str, unique: str = "") -> sa.Table:
    """The table whose rows are records of this type; a field that may be None may be NULL.

    `rules` are checked by the database in every row, and so is that a state is one of its enum.
    """
    columns: list[sa.Column[Any]] = []
    checks = [sa.CheckConstraint(rule) for rule in rules]
    hints = get_type_hints(record)
    for field in (each.name for each in fields(record)):
        hint = hints[field]
        may_be_none = isinstance(hint, UnionType)
        kind = get_args(hint)[0] if may_be_none else hint
        target = _REFERENCES.get(field, f"{name}.{field}")
        columns.append(
            sa.Column(
                field,
                _STORED.get(kind, TEXT),
                *([] if target == f"{name}.{field}" else [sa.ForeignKey(target)]),
                primary_key=field in key,
                autoincrement=False,
                nullable=may_be_none,
                unique=field == unique or None,
            )
        )
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            checks.append(sa.CheckConstraint(f"{field} IN {tuple(state.value for state in kind)}"))
    NAMES[record] = name
    return sa.Table(name, metadata, *columns, *checks)


def _texts(name: str, key: str, value: str) -> sa.Table:
    """A table of texts by their names."""
    columns = sa.Column(key, TEXT, primary_key=True), sa.Column(value, TEXT, nullable=False)
    return sa.Table(name, metadata, *columns)


schema_version = sa.Table(
    "schema_version",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
)
runs = _of(records.RunRecord, "runs", ("run_id",))
manifests = _of(records.ManifestRecord, "manifests", ("version",), unique="sha256")
workers = _of(records.WorkerRecord, "workers", ("worker_id",))
publishers = _of(records.PublisherRecord, "publishers", ("worker_id",), unique="public_key")
generations = _of(records.GenerationRecord, "generations", ("number",))
rounds = _of(records.RoundRecord, "rounds", ("round",))
datasets = _of(records.DatasetRecord, "datasets", ("dataset_id",))
snapshots = _of(records.SnapshotRecord, "snapshots", ("version",))
evaluations = _of(records.EvaluationRecord, "evaluations", ("version", "worker_id"))
groups = _of(records.GroupRecord, "groups", ("number",))
saves = _of(records.SaveRecord, "saves", ("group_number", "step", "rank"))
parts = _of(records.PartRecord, "parts", ("round", "group_number", "rank"))
checkpoints = _of(records.CheckpointRecord, "checkpoints", ("round",))
contributions = _of(
    records.ContributionRecord,
    "contributions",
    ("round", "worker_id"),
    "first <= round AND round <= applied",
)
sa.Index("contributions_by_applied", contributions.c.applied)
announcements = _of(records.AnnouncementRecord, "announcements", ("round", "worker_id"))
skips = _of(records.SkipRecord, "skips", ("round", "worker_id", "number"))
leases = _of(
    records.LeaseRecord,
    "leases",
    ("round", "worker_id", "start", "dataset_id", "lease_epoch"),
    "start >= 0 AND start < stop",
)
# The end of what was issued, and who covers a unit: looked for from the newest rows on.
sa.Index("leases_by_stop", leases.c.dataset_id, leases.c.stop)
sa.Index("leases_by_state", leases.c.state)

# Nothing but the key is required: an entry that lost a field must be read to be named and refused.
queues = sa.Table(
    "queues",
    metadata,
    sa.Column("name", TEXT, primary_key=True),  # dataset_id/shuffle_seed/epoch
    sa.Column("length", sa.BigInteger),
    sa.Column("units", sa.BigInteger),
    sa.Column("unit_rows", sa.BigInteger),
    sa.Column("issued", sa.LargeBinary),
    sa.Column("done", sa.LargeBinary),
)
credentials = _texts("credentials", "role", "sha256")
control = _texts("control", "name", "value")


def newest_round(*states: records.RoundState) -> sa.ColumnElement[int]:
    """SQL of the highest number among the rounds in these states; 0 without one.

    Looks from the newest on: to look at the states of all would take longer with every round.
    """
    is_in = sa.or_(*(rounds.c.state == state.value for state in states))
    found = sa.select(rounds.c.round).where(is_in).order_by(rounds.c.round.desc()).limit(1)
    return sa.func.coalesce(found.scalar_subquery(), 0)


class Statements:
    """The statements on whole rows of one table, made once because the connection caches them.

    They take the primary key of a row as parameters: `of_round` for the column `round`.
    """

    def __init__(self, table: sa.Table) -> None:
        columns = table.primary_key.columns
        self.key = [f"of_{column.name}" for column in columns]
        is_row = [
            column == sa.bindparam(name) for column, name in zip(columns, self.key, strict=True)
        ]
        self.all = sa.select(table).order_by(*columns)
        self.find = sa.select(table).where(*is_row)
        self.insert = sa.insert(table)
        self.update = sa.update(table).where(*is_row)
        self.delete = sa.delete(table).where(*is_row)


STATEMENTS = {name: Statements(table) for name, table in metadata.tables.items()}
