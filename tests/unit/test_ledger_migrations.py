"""Steps are whole or not at all, forward only, and end in the tables the program uses."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, NullPool, create_engine, inspect

from atoll.data import base
from atoll.errors import LedgerTooNew, StateDamaged, StoreError
from atoll.ledger import engines, epochs, migrations, schema, seals, sql
from atoll.ledger.database import Database
from atoll.ledger.migrations import STEPS, Step
from atoll.proof import balance
from tests import servers

# A released step is never edited: ledgers in the world have it behind them. Add a step instead.
VERSION_1_SHA256 = "c189b835f66a487d8f68dca91acfe5f6aab4929e3bfffed6f917e0c24d456f38"


@pytest.fixture(scope="module")
def reused_url(postgres_server: servers.RunningServer) -> str:
    """One PostgreSQL database for all tests here: making one for each is slow."""
    return servers.create_database(postgres_server, f"migrations_{os.getpid()}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    url = str(request.getfixturevalue("reused_url"))
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    return url


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = engines.open_database(url)
    yield opened
    opened.close()


def add_note(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE workers ADD COLUMN note TEXT DEFAULT 'none'")
    connection.exec_driver_sql("CREATE TABLE notes (id BIGINT PRIMARY KEY)")


def add_note_then_die(connection: Connection) -> None:
    add_note(connection)
    raise KeyboardInterrupt


def add_note_then_break_sql(connection: Connection) -> None:
    add_note(connection)
    connection.exec_driver_sql("CREATE TABLE notes (id BIGINT PRIMARY KEY)")


def add_note_and_lose_the_version(connection: Connection) -> None:
    add_note(connection)
    connection.exec_driver_sql("DROP TABLE schema_version")


def make_tables_then_die(connection: Connection) -> None:
    STEPS[0].apply(connection)
    raise KeyboardInterrupt


LAST, NEXT = len(STEPS), len(STEPS) + 1
ONE_MORE = (*STEPS, Step(NEXT, add_note))


def version(database: Database) -> int:
    with database.reading() as connection:
        return migrations.stored_version(connection, name=database.name)


def tables(database: Database) -> set[str]:
    with database.reading() as connection:
        # Who holds the database is known before there is a ledger in it.
        return set(inspect(connection).get_table_names()) - {epochs.TABLE}


def description(connection: Connection) -> dict[str, object]:
    """Everything about the tables that an engine can tell."""
    inspector = inspect(connection)
    return {
        name: {
            "columns": [
                (c["name"], str(c["type"]).upper(), c["nullable"], c["default"])
                for c in inspector.get_columns(name)
            ],
            "key": inspector.get_pk_constraint(name)["constrained_columns"],
            "references": sorted(
                (f["constrained_columns"], f["referred_table"], f["referred_columns"])
                for f in inspector.get_foreign_keys(name)
            ),
            "unique": sorted(u["column_names"] for u in inspector.get_unique_constraints(name)),
            "checks": len(inspector.get_check_constraints(name)),
        }
        for name in inspector.get_table_names()
        if name != seals.TABLE  # SQLite's alone; statements on it are in its module
    }


def test_empty_database_is_at_version_0(database: Database):
    assert version(database) == 0


def test_migrate_ends_at_the_last_step(database: Database):
    migrations.migrate(database)

    assert version(database) == len(STEPS)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM schema_version",
        "INSERT INTO schema_version VALUES (1)",
        "UPDATE schema_version SET version = -1",
        "UPDATE schema_version SET version = 0",
    ],
)
def test_version_that_cannot_be_is_damage_by_name(database: Database, change: str):
    migrations.migrate(database)
    with database.writing() as connection:
        connection.exec_driver_sql(change)
    before = tables(database)

    with pytest.raises(StateDamaged, match=re.escape(database.name)):
        migrations.migrate(database)
    assert tables(database) == before


@pytest.mark.parametrize("stored", ["NULL", "'five'", "x'05'", "5.5"])
def test_version_of_another_type_is_damage_by_name(tmp_path: Path, stored: str):
    """SQLite stores any type in any column; a changed byte makes one of another."""
    database = engines.open_database(str(tmp_path / "ledger.db"))
    with closing(database), database.bare() as connection:
        connection.exec_driver_sql("CREATE TABLE schema_version (version)")
        connection.exec_driver_sql(f"INSERT INTO schema_version VALUES ({stored})")
    database = engines.open_database(str(tmp_path / "ledger.db"))

    with closing(database), pytest.raises(StateDamaged, match="must hold one, a number from 1"):
        migrations.migrate(database)


def test_migrated_tables_are_those_that_statements_are_built_from(database: Database):
    migrations.migrate(database)
    with database.reading() as connection:
        migrated = description(connection)
    with database.writing() as connection:
        schema.metadata.drop_all(connection)
        schema.metadata.create_all(connection)
        declared = description(connection)

    assert migrated == declared


def test_first_step_is_the_released_one():
    text = "\n".join(migrations.VERSION_1)

    assert hashlib.sha256(text.encode()).hexdigest() == VERSION_1_SHA256


def test_ledger_keeps_its_rows_when_a_step_is_added(database: Database):
    migrations.migrate(database)
    ledger = sql.SqlLedger(database)
    ledger.register("a", "key", wall=1.5)
    before = ledger.workers()

    migrations.migrate(database, ONE_MORE)

    assert version(database) == NEXT
    with database.reading() as connection:
        rows = connection.exec_driver_sql("SELECT worker_id, note FROM workers").all()
    assert [tuple(row) for row in rows] == [("a", "none")]
    assert ledger.workers() == before


def test_registered_workers_of_version_1_are_the_first_generation(database: Database):
    migrations.migrate(database, STEPS[:1])
    with database.writing() as connection:
        for name, life, active in (("b", 3, "TRUE"), ("a", 1, "TRUE"), ("left", 2, "FALSE")):
            connection.exec_driver_sql(
                f"INSERT INTO workers VALUES ('{name}', 'key', {life}, {active}, 1.5)"
            )

    migrations.migrate(database)

    generation = sql.SqlLedger(database).generation()
    assert generation.number == 1
    assert [(m.rank, m.worker_id, m.incarnation) for m in generation.members] == [
        (0, "a", 1),
        (1, "b", 3),
    ]


MANIFEST_OF_3 = '{"seed":5,"data":{"definition":{},"identity":{"kind":"text","rows":10,"block":4}}}'
# round, worker, start, stop, state: 10 rows an epoch, of which the second is under way
LEASES_OF_3 = [
    (1, "a", 0, 4, "done"),
    (1, "b", 4, 8, "taken"),
    (2, "a", 4, 6, "done"),
    (2, "b", 6, 8, "done"),
    (3, "a", 8, 12, "done"),
    (3, "b", 12, 16, "leased"),
]


def test_leases_of_version_3_become_leases_of_units(database: Database):
    """Cut at the end of their epoch, with how often their rows were issued; queues beside them."""
    migrations.migrate(database, STEPS[:3])
    with database.writing() as connection:
        connection.exec_driver_sql(f"INSERT INTO manifests VALUES (1, 'm', '{MANIFEST_OF_3}', 1)")
        for name, life in (("a", 1), ("b", 3)):
            connection.exec_driver_sql(
                f"INSERT INTO workers VALUES ('{name}', 'key', {life}, TRUE, 1.5)"
            )
        for number in (1, 2, 3):
            connection.exec_driver_sql(
                f"INSERT INTO rounds (round, state, manifest_sha256, cursor) "
                f"VALUES ({number}, 'open', 'm', {16 if number == 3 else 8})"
            )
        for number, name, start, stop, state in LEASES_OF_3:
            connection.exec_driver_sql(
                f"INSERT INTO leases VALUES ({number}, '{name}', {start}, {stop}, '{state}')"
            )

    migrations.migrate(database, STEPS[:4])

    ledger = sql.SqlLedger(database)
    found = [lease for number in (1, 2, 3) for lease in ledger.leases(number)]
    identity = {"kind": "text", "block": 4}
    assert {lease.dataset_id for lease in found} == {base.dataset_id(identity)}
    assert [
        (x.round, x.worker_id, x.start, x.stop, x.epoch, x.unit, x.lease_epoch, x.incarnation)
        for x in found
    ] == [
        (1, "a", 0, 4, 0, 0, 1, 1),
        (1, "b", 4, 8, 0, 4, 1, 3),
        (2, "a", 4, 6, 0, 4, 2, 1),
        (2, "b", 6, 8, 0, 6, 2, 3),
        (3, "a", 8, 10, 0, 8, 1, 1),
        (3, "a", 10, 12, 1, 0, 1, 1),
        (3, "b", 12, 16, 1, 2, 1, 3),
    ]
    assert [(d.name, d.length, d.weight) for d in ledger.datasets()] == [("text", 10, 1)]
    assert [(q.epoch, q.issued.hex(), q.done.hex()) for q in ledger.queues().sound] == [
        (0, "ff03", "ff03"),
        (1, "3f00", "0300"),
    ]
    assert list(balance.check_queues(ledger.queues(), found, ledger.datasets())) == []
    assert "leases_3" not in tables(database)


def test_empty_database_goes_through_all_steps(database: Database):
    migrations.migrate(database, ONE_MORE)

    assert version(database) == NEXT
    assert "notes" in tables(database)


def test_migrate_again_changes_nothing(database: Database):
    migrations.migrate(database)
    before = sql.SqlLedger(database).state_hash()

    migrations.migrate(database)

    assert sql.SqlLedger(database).state_hash() == before


def test_step_that_dies_leaves_version_and_tables_as_they_were(database: Database):
    migrations.migrate(database)
    before = tables(database)

    with pytest.raises(KeyboardInterrupt):
        migrations.migrate(database, (*STEPS, Step(NEXT, add_note_then_die)))

    assert (version(database), tables(database)) == (LAST, before)
    migrations.migrate(database, ONE_MORE)
    assert version(database) == NEXT


def test_step_that_the_database_refuses_leaves_version_and_tables_as_they_were(
    database: Database,
):
    migrations.migrate(database)
    before = tables(database)

    with pytest.raises(StoreError, match="already exists"):
        migrations.migrate(database, (*STEPS, Step(NEXT, add_note_then_break_sql)))

    assert (version(database), tables(database)) == (LAST, before)


def test_step_is_undone_when_its_version_cannot_be_recorded(database: Database):
    migrations.migrate(database)
    before = tables(database)

    with pytest.raises(StoreError, match="schema_version"):
        migrations.migrate(database, (*STEPS, Step(NEXT, add_note_and_lose_the_version)))

    assert (version(database), tables(database)) == (LAST, before)


def test_first_step_that_dies_leaves_an_empty_database(database: Database):
    with pytest.raises(KeyboardInterrupt):
        migrations.migrate(database, (Step(1, make_tables_then_die),))

    assert (version(database), tables(database)) == (0, set())


def test_steps_before_one_that_dies_stay(database: Database):
    with pytest.raises(KeyboardInterrupt):
        migrations.migrate(database, (*STEPS, Step(NEXT, add_note_then_die)))

    assert version(database) == LAST


def test_older_program_refuses_a_newer_ledger_by_both_versions(database: Database):
    migrations.migrate(database, ONE_MORE)

    with pytest.raises(
        LedgerTooNew, match=rf"has version {NEXT} .* up to {LAST}; .* use the Atoll"
    ):
        migrations.migrate(database)

    assert version(database) == NEXT


def test_open_ledger_lets_go_of_a_newer_ledger_that_it_refuses(url: str):
    newer = engines.open_database(url)
    migrations.migrate(newer, ONE_MORE)
    newer.close()

    with pytest.raises(LedgerTooNew) as refused:
        engines.open_ledger(url)

    again = engines.open_database(url)
    assert version(again) == NEXT
    del refused  # until here its traceback would have kept a forgotten connection alive
    again.close()
