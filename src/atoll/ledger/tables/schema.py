"""The ledger's tables as SQLAlchemy Core sees them; columns are named as in `records`.

What statements are built from, and what `migrations` makes; a test compares this with the tables
that a database tells of.
"""

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

# PostgreSQL sorts text by the database's locale unless told otherwise. The order of worker_id is
# the order of the fold, so it has to be by code point everywhere, as SQLite and Python sort.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData()

schema_version = Table(
    "schema_version",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", TEXT, primary_key=True),
    Column("created_wall", Double, nullable=False),
    Column("initial_sha256", TEXT, nullable=False),
)

manifests = Table(
    "manifests",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("sha256", TEXT, nullable=False, unique=True),
    Column("body", TEXT, nullable=False),
    Column("from_round", BigInteger, nullable=False),
)

credentials = Table(
    "credentials",
    metadata,
    Column("role", TEXT, primary_key=True),
    Column("sha256", TEXT, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", TEXT, primary_key=True),
    Column("key_sha256", TEXT, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("active", Boolean, nullable=False),
    Column("registered_wall", Double, nullable=False),
)

generations = Table(
    "generations",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("created_wall", Double, nullable=False),
    Column("members", TEXT, nullable=False),  # JSON: [{rank, worker_id, ...}, ...] by rank
)

rounds = Table(
    "rounds",
    metadata,
    Column("round", BigInteger, primary_key=True, autoincrement=False),
    Column("state", TEXT, nullable=False),
    Column("manifest_sha256", TEXT, ForeignKey("manifests.sha256"), nullable=False),
    Column("cursor", BigInteger, nullable=False),
    Column("fragment", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("prev_hash", TEXT),
    Column("hash", TEXT),
    Column("master_digest", TEXT),
    Column("published_digest", TEXT),
    Column("leaves", LargeBinary),
    Column("published_leaves", LargeBinary),
    Column("published_wall", Double),
    CheckConstraint("state IN ('planned', 'open', 'frozen', 'published')"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("dataset_id", TEXT, primary_key=True),
    Column("name", TEXT, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("weight", BigInteger, nullable=False),
)

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

leases = Table(
    "leases",
    metadata,
    Column("round", BigInteger, ForeignKey("rounds.round"), primary_key=True, autoincrement=False),
    Column("worker_id", TEXT, ForeignKey("workers.worker_id"), primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("stop", BigInteger, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("dataset_id", TEXT, primary_key=True),
    Column("shuffle_seed", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("unit", BigInteger, nullable=False),
    Column("lease_epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("incarnation", BigInteger, nullable=False),
    CheckConstraint("start >= 0 AND start < stop"),
    CheckConstraint("state IN ('leased', 'done', 'reopened', 'taken', 'given_up')"),
)
# The end of what was issued, and who covers a unit: looked for from the newest rows on.
leases_by_stop = Index("leases_by_stop", leases.c.dataset_id, leases.c.stop)
leases_by_state = Index("leases_by_state", leases.c.state)

contributions = Table(
    "contributions",
    metadata,
    Column("round", BigInteger, ForeignKey("rounds.round"), primary_key=True, autoincrement=False),
    Column("worker_id", TEXT, ForeignKey("workers.worker_id"), primary_key=True),
    Column("applied", BigInteger, ForeignKey("rounds.round"), nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("fragment", BigInteger, nullable=False),
    Column("base", TEXT, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("sha256", TEXT, nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    Column("weight", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("loss_sum", Double, nullable=False),
    Column("norm", Double, nullable=False),
    Column("receipt", TEXT, nullable=False),
    Column("accepted_wall", Double, nullable=False),
    CheckConstraint("first <= round AND round <= applied"),
)
contributions_by_applied = Index("contributions_by_applied", contributions.c.applied)

snapshots = Table(
    "snapshots",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("master_sha256", TEXT, nullable=False),
    Column("published_sha256", TEXT, nullable=False),
    Column("slots_sha256", TEXT, nullable=False),  # JSON: [[slot name, blob], ...]
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("worker_id", TEXT, ForeignKey("workers.worker_id"), primary_key=True),
    Column("loss_sum", Double, nullable=False),
    Column("tokens", BigInteger, nullable=False),
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
