"""The numbered steps from an empty database to the present tables.

Forward only. A step and its version number are one transaction, so a crash leaves the version
before it. A released step is never edited: what changes is a new step at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, inspect, select, text

from atoll import canonical
from atoll.errors import LedgerTooNew, StateDamaged
from atoll.ledger import adopt, schema, seals
from atoll.ledger.database import Database


@dataclass(frozen=True, slots=True)
class Step:
    """What turns a ledger of version `version - 1` into one of `version`."""

    version: int
    apply: Callable[[Connection], None]


# In braces: the types that the engines name differently; see schema.TEXT for the collation.
VERSION_1 = (
    "CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY)",
    """CREATE TABLE runs (
        run_id {text} NOT NULL PRIMARY KEY,
        created_wall {float} NOT NULL,
        initial_sha256 {text} NOT NULL)""",
    """CREATE TABLE manifests (
        version BIGINT NOT NULL PRIMARY KEY,
        sha256 {text} NOT NULL UNIQUE,
        body {text} NOT NULL,
        from_round BIGINT NOT NULL)""",
    """CREATE TABLE credentials (
        role {text} NOT NULL PRIMARY KEY,
        sha256 {text} NOT NULL)""",
    """CREATE TABLE workers (
        worker_id {text} NOT NULL PRIMARY KEY,
        key_sha256 {text} NOT NULL,
        incarnation BIGINT NOT NULL,
        active BOOLEAN NOT NULL,
        registered_wall {float} NOT NULL)""",
    """CREATE TABLE rounds (
        round BIGINT NOT NULL PRIMARY KEY,
        state {text} NOT NULL CHECK (state IN ('planned', 'open', 'frozen', 'published')),
        manifest_sha256 {text} NOT NULL REFERENCES manifests (sha256),
        cursor BIGINT NOT NULL,
        prev_hash {text},
        hash {text},
        master_digest {text},
        published_digest {text},
        leaves {bytes},
        published_leaves {bytes},
        published_wall {float})""",
    """CREATE TABLE leases (
        round BIGINT NOT NULL REFERENCES rounds (round),
        worker_id {text} NOT NULL REFERENCES workers (worker_id),
        start BIGINT NOT NULL,
        stop BIGINT NOT NULL,
        state {text} NOT NULL CHECK (state IN ('leased', 'done', 'reopened', 'taken')),
        PRIMARY KEY (round, worker_id, start),
        CHECK (start >= 0 AND start < stop))""",
    """CREATE TABLE contributions (
        round BIGINT NOT NULL REFERENCES rounds (round),
        worker_id {text} NOT NULL REFERENCES workers (worker_id),
        incarnation BIGINT NOT NULL,
        sha256 {text} NOT NULL,
        nbytes BIGINT NOT NULL,
        weight BIGINT NOT NULL,
        rows BIGINT NOT NULL,
        tokens BIGINT NOT NULL,
        loss_sum {float} NOT NULL,
        norm {float} NOT NULL,
        receipt {text} NOT NULL,
        accepted_wall {float} NOT NULL,
        PRIMARY KEY (round, worker_id))""",
    """CREATE TABLE snapshots (
        version BIGINT NOT NULL PRIMARY KEY,
        master_sha256 {text} NOT NULL,
        published_sha256 {text} NOT NULL,
        slots_sha256 {text} NOT NULL)""",
    """CREATE TABLE evaluations (
        version BIGINT NOT NULL,
        worker_id {text} NOT NULL REFERENCES workers (worker_id),
        loss_sum {float} NOT NULL,
        tokens BIGINT NOT NULL,
        PRIMARY KEY (version, worker_id))""",
)
VERSION_2 = (
    """CREATE TABLE generations (
        number BIGINT NOT NULL PRIMARY KEY,
        created_wall {float} NOT NULL,
        members {text} NOT NULL)""",
)
VERSION_3 = (
    """CREATE TABLE control (
        name {text} NOT NULL PRIMARY KEY,
        value {text} NOT NULL)""",
)
# SQLite cannot change a key or a check, so the table of leases is made anew.
VERSION_4 = (
    """CREATE TABLE datasets (
        dataset_id {text} NOT NULL PRIMARY KEY,
        name {text} NOT NULL,
        length BIGINT NOT NULL,
        weight BIGINT NOT NULL)""",
    """CREATE TABLE queues (
        name {text} NOT NULL PRIMARY KEY,
        length BIGINT,
        units BIGINT,
        unit_rows BIGINT,
        issued {bytes},
        done {bytes})""",
    "ALTER TABLE leases RENAME TO leases_3",
    """CREATE TABLE leases (
        round BIGINT NOT NULL REFERENCES rounds (round),
        worker_id {text} NOT NULL REFERENCES workers (worker_id),
        start BIGINT NOT NULL,
        stop BIGINT NOT NULL,
        state {text} NOT NULL
            CHECK (state IN ('leased', 'done', 'reopened', 'taken', 'given_up')),
        dataset_id {text} NOT NULL,
        shuffle_seed BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        unit BIGINT NOT NULL,
        lease_epoch BIGINT NOT NULL,
        incarnation BIGINT NOT NULL,
        PRIMARY KEY (round, worker_id, start, dataset_id, lease_epoch),
        CHECK (start >= 0 AND start < stop))""",
    "CREATE INDEX leases_by_stop ON leases (dataset_id, stop)",
    "CREATE INDEX leases_by_state ON leases (state)",
)
_TYPES = {
    "sqlite": {"text": "TEXT", "bytes": "BLOB", "float": "DOUBLE"},
    "postgresql": {"text": 'TEXT COLLATE "C"', "bytes": "BYTEA", "float": "DOUBLE PRECISION"},
}


def _make_tables(connection: Connection) -> None:
    _run(connection, VERSION_1)


def _make_generations(connection: Connection) -> None:
    """Workers that were registered before are the members of the first generation."""
    _run(connection, VERSION_2)
    registered = connection.exec_driver_sql(
        "SELECT worker_id, incarnation, registered_wall FROM workers WHERE active "
        "ORDER BY worker_id"
    ).all()
    members = [
        {"rank": rank, "worker_id": name, "incarnation": life, "ip_address": "", "port": 0}
        for rank, (name, life, _) in enumerate(registered)
    ]
    if members:
        connection.execute(
            text("INSERT INTO generations (number, created_wall, members) VALUES (1, :wall, :all)"),
            {"wall": max(wall for _, _, wall in registered), "all": canonical.dumps(members)},
        )


def _run(connection: Connection, statements: Sequence[str]) -> None:
    types = _TYPES[connection.dialect.name]
    for statement in statements:
        connection.exec_driver_sql(statement.format_map(types))


def _make_control(connection: Connection) -> None:
    _run(connection, VERSION_3)


def _make_queues(connection: Connection) -> None:
    _run(connection, VERSION_4)
    adopt.leases_of_version_3(connection)
    connection.exec_driver_sql("DROP TABLE leases_3")


SEALED = 5  # the first version with seals
STEPS: tuple[Step, ...] = (
    Step(1, _make_tables),
    Step(2, _make_generations),
    Step(3, _make_control),
    Step(4, _make_queues),
    Step(SEALED, seals.make),
)


def stored_version(connection: Connection, *, name: str) -> int:
    """The version of the tables in this database; 0 when there are none."""
    if not inspect(connection).has_table(schema.schema_version.name):
        return 0
    found = list(connection.execute(select(schema.schema_version.c.version)).scalars())
    if len(found) != 1 or not isinstance(found[0], int) or found[0] < 1:
        raise StateDamaged(
            f"the ledger {name} holds the versions {found!r} of its tables and must hold one, a "
            f"number from 1; `atoll repair` shows what of it can be kept, or restore it from a copy"
        )
    return found[0]


def migrate(database: Database, steps: Sequence[Step] = STEPS) -> None:
    """Brings the ledger to the version of the last step; LedgerTooNew when it is beyond that.

    From then on every transaction of this database keeps the seals.
    """
    assert [step.version for step in steps] == list(range(1, len(steps) + 1)), steps
    with database.reading() as connection:
        stored = stored_version(connection, name=database.name)
    if stored > len(steps):
        raise LedgerTooNew(
            f"the ledger {database.name} has version {stored} and this program knows versions "
            f"up to {len(steps)}; a ledger is never taken back, so use the Atoll that wrote it "
            f"or a later one"
        )
    if 0 < stored < len(steps):
        seals.check_before_migration(database)
    database.at_commit = None
    for step in steps[stored:]:
        with database.writing() as connection:
            step.apply(connection)
            connection.execute(delete(schema.schema_version))
            connection.execute(insert(schema.schema_version).values(version=step.version))
            seals.renew(connection)
    if database.is_sqlite and len(steps) >= SEALED:
        database.at_commit = seals.Sealing(database)
