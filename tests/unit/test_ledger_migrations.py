"""Tables are made whole or not at all, or added to; those of other versions are refused."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, NullPool, create_engine, inspect
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine import Dialect

from atoll.errors import LedgerVersion, StateDamaged, StoreError
from atoll.ledger import engines, migrations
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.ledger.postgres import epochs
from atoll.ledger.records import AnnouncementRecord, PublisherRecord
from atoll.ledger.sqlite import salvage, seals
from atoll.ledger.tables import schema
from tests import servers


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


version = migrations.stored_version


def tables(database: Database) -> set[str]:
    of = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table'",
        "postgresql": "SELECT tablename FROM pg_tables WHERE schemaname = 'public'",
    }
    with database.reading() as connection:
        # Who holds the database is known before there is a ledger in it.
        return {name for [name] in connection.rows(of[connection.engine])} - {epochs.TABLE}


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
        if name not in (seals.TABLE, epochs.TABLE)  # an engine's own; statements on it are there
    }


def test_empty_database_is_at_version_0(database: Database):
    assert version(database) == 0


def test_migrate_ends_at_the_version_of_this_program(database: Database):
    migrations.migrate(database)

    assert version(database) == migrations.VERSION


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
        connection.change(change)
    before = tables(database)

    with pytest.raises(StateDamaged, match=re.escape(database.name)):
        migrations.migrate(database)
    assert tables(database) == before


@pytest.mark.parametrize("stored", ["NULL", "'five'", "x'05'", "5.5"])
def test_version_of_another_type_is_damage_by_name(tmp_path: Path, stored: str):
    """SQLite stores any type in any column; a changed byte makes one of another."""
    database = engines.open_database(str(tmp_path / "ledger.db"))
    with closing(database), database.writing() as connection:
        connection.change("CREATE TABLE schema_version (version)")
        connection.change(f"INSERT INTO schema_version VALUES ({stored})")
    database = engines.open_database(str(tmp_path / "ledger.db"))

    with closing(database), pytest.raises(StateDamaged, match="must hold one, a number from 1"):
        migrations.migrate(database)


def test_migrated_tables_are_those_that_statements_are_built_from(url: str):
    with closing(engines.open_database(url)) as database:
        migrations.migrate(database)
    engine = create_engine(url if "://" in url else f"sqlite:///{url}", poolclass=NullPool)
    with engine.begin() as connection:
        migrated = description(connection)
        schema.metadata.drop_all(connection)
        schema.metadata.create_all(connection)
        declared = description(connection)

    assert migrated == declared


@pytest.mark.parametrize(
    ("dialect", "sha256"),
    [
        (sqlite.dialect(), "7ec5b53e79bd0a5c7090c372dfb4e2be4dec3c1b0d2e10d2a9fa2a4092602d9b"),
        (psycopg.dialect(), "0b95147a52c5b2d22635ec341aa5ad2134af6ad5a7b417ce7513b91ce9fe1f96"),
    ],
    ids=["sqlite", "postgres"],
)
def test_tables_change_only_with_the_version(dialect: Dialect, sha256: str):
    """A column follows from a record's field: whoever changes one must see that tables change."""
    made = "".join(migrations.statements(dialect)).encode()

    assert (migrations.VERSION, hashlib.sha256(made).hexdigest()) == (11, sha256)


def test_migrate_again_changes_nothing(database: Database):
    migrations.migrate(database)
    before = Ledger(database).state_hash()

    migrations.migrate(database)

    assert Ledger(database).state_hash() == before


def test_making_that_dies_leaves_an_empty_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    def die() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "made", die)  # the last of it

    with pytest.raises(KeyboardInterrupt):
        migrations.migrate(database)
    assert (version(database), tables(database)) == (0, set())


def test_tables_that_the_database_refuses_leave_it_as_it_was(database: Database):
    with database.writing() as connection:
        connection.change("CREATE TABLE workers (id BIGINT PRIMARY KEY)")

    with pytest.raises(StoreError, match="already exists"):
        migrations.migrate(database)
    assert (version(database), tables(database)) == (0, {"workers"})


def other_version(url: str, stored: int) -> None:
    with closing(engines.open_database(url)) as database:
        migrations.migrate(database)
        with database.writing() as connection:
            connection.change(schema.schema_version.update().values(version=stored))


@pytest.mark.parametrize("stored", [migrations.VERSION - 2, migrations.VERSION + 1])
def test_ledger_of_another_version_is_refused_by_name_and_let_go(url: str, stored: int):
    other_version(url, stored)

    told = rf"has version {stored} and .* version {migrations.VERSION} alone; use the Atoll"
    with pytest.raises(LedgerVersion, match=told) as refused:
        engines.open_ledger(url)

    again = engines.open_database(url)
    assert version(again) == stored
    del refused  # until here its traceback would have kept a forgotten connection alive
    again.close()


def test_ledger_of_another_version_is_not_salvaged(tmp_path: Path):
    other_version(str(tmp_path / "old.sqlite"), migrations.VERSION - 1)

    with pytest.raises(LedgerVersion, match=r"the ledger 'mine' has version"):
        salvage.salvage(tmp_path / "old.sqlite", tmp_path / "new.sqlite", name="'mine'")


OLD = Path(__file__).parents[1] / "ledgers_of_old"
ROWS_OF_10 = (
    f"INSERT INTO runs VALUES ('run-1', 1.5, '{'1' * 64}')",
    f"INSERT INTO manifests VALUES (1, '{'2' * 64}', '{{}}', 1)",
    f"INSERT INTO workers VALUES ('a', '{'3' * 64}', 2, TRUE, 3.5)",
    "INSERT INTO rounds (round, state, manifest_sha256, cursor, fragment, tokens) "
    f"VALUES (1, 'open', '{'2' * 64}', 8, 0, 0)",
)


def made_by_version_10(url: str) -> None:
    """A ledger with a worker and a round, as the program before this one left it."""
    with closing(engines.open_database(url)) as database, database.writing() as connection:
        text = (OLD / f"version_10.{connection.engine}.sql").read_text()
        for statement in (*filter(str.strip, text.split(";\n")), *ROWS_OF_10):
            connection.change(statement)
        connection.change("INSERT INTO schema_version VALUES (10)")
        database.made()


def test_ledger_of_the_version_before_gets_what_it_lacks(url: str):
    made_by_version_10(url)

    with closing(engines.open_database(url)) as database:
        migrations.migrate(database)
        ledger = Ledger(database)
        with ledger.writing() as t:
            [worker], [held] = t.members.workers(), t.rounds.all()
            t.publishers.add(PublisherRecord("a", "4" * 64, "main"))
            t.announcements.add(AnnouncementRecord(1, "a", "{}", 2.5))
            t.skips.add(1, "a", reason="SIZE", sentence="too long", wall=4.5)

        assert (worker.incarnation, held.cursor, held.artifact_sha256) == (2, 8, None)
        assert version(database) == migrations.VERSION
        assert ledger.damage() == []
    engine = create_engine(url if "://" in url else f"sqlite:///{url}", poolclass=NullPool)
    with engine.begin() as connection:
        migrated = description(connection)
        schema.metadata.drop_all(connection)
        schema.metadata.create_all(connection)
        assert migrated == description(connection)


def test_adding_that_dies_leaves_the_version_before(url: str, monkeypatch: pytest.MonkeyPatch):
    def die() -> None:
        raise KeyboardInterrupt

    made_by_version_10(url)
    with closing(engines.open_database(url)) as database:
        monkeypatch.setattr(database, "changed", die)  # the last of it
        before = tables(database)

        with pytest.raises(KeyboardInterrupt):
            migrations.migrate(database)
        assert (version(database), tables(database)) == (10, before)


def test_damaged_ledger_of_the_version_before_is_not_sealed_anew(tmp_path: Path):
    url = str(tmp_path / "ledger.db")
    made_by_version_10(url)
    with closing(engines.open_database(url)) as database, database.writing() as connection:
        connection.change("UPDATE workers SET incarnation = 7")  # beside the seals

    with closing(engines.open_database(url)) as database:
        with pytest.raises(StateDamaged, match=r"table 'workers' .*are of version 10 and stay"):
            migrations.migrate(database)
        assert version(database) == 10
