"""What only one engine has: files and their disk, servers and their sessions."""

import os
import sys
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine

from atoll import errors
from atoll.ledger import engines, migrations
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.ledger.sqlite import connect
from atoll.ledger.sqlite.database import SqliteDatabase
from tests.ledgers import MANIFEST, RUN, STATE_OF_PLAY, alone, play


def open_over(database: Database) -> Ledger:
    migrations.migrate(database)
    return Ledger(database)


def test_sqlite_connection_is_durable_exclusive_and_checks_foreign_keys(tmp_path: Path):
    database = connect.open_file(str(tmp_path / "ledger.db"))
    names = ["journal_mode", "synchronous", "foreign_keys", "locking_mode", "trusted_schema"]

    with database.bare() as connection:
        found = [connection.value(f"PRAGMA {name}") for name in names]

    assert found == ["wal", 2, 1, "exclusive", 0]
    database.close()


def test_memory_ledger_gives_the_same_state():
    ledger = engines.open_ledger(":memory:")
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY
    ledger.close()


def test_sqlite_url_names_the_same_ledger_as_its_path(tmp_path: Path):
    path = tmp_path / "ledger.db"
    by_url = engines.open_ledger(f"sqlite:///{path}")
    alone(by_url).run.create(RUN, MANIFEST)
    by_url.close()

    by_path = engines.open_ledger(path)

    assert alone(by_path).run.get() == RUN
    by_path.close()


def test_sqlite_ledger_works_with_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pysqlite3", None)
    monkeypatch.setattr(connect, "driver", connect.driver.__wrapped__)
    ledger = engines.open_ledger(tmp_path / "ledger.db")
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY
    ledger.close()


def test_full_disk_is_storage_full_and_the_ledger_goes_on_afterwards(tmp_path: Path):
    database = connect.open_file(str(tmp_path / "ledger.db"))
    ledger = open_over(database)
    alone(ledger).run.create(RUN, MANIFEST)
    before = ledger.state_hash()
    set_page_limit(database, pages=1)  # SQLite raises it to what the file has already

    with pytest.raises(errors.StorageFull, match="free some space"):
        alone(ledger).credentials.set({"admin": "x" * 100_000})

    assert ledger.state_hash() == before
    set_page_limit(database, pages=1000)
    alone(ledger).credentials.set({"admin": "x" * 100_000})
    assert alone(ledger).credentials.all() == {"admin": "x" * 100_000}
    ledger.close()


def set_page_limit(database: SqliteDatabase, *, pages: int) -> None:
    with database.bare() as connection:
        connection.rows(f"PRAGMA max_page_count = {pages}")


def test_file_that_is_no_database_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database, " * 100)

    with pytest.raises(errors.StateDamaged, match=r"ledger\.db"):
        engines.open_ledger(path)


def test_absent_directory_is_refused_by_name(tmp_path: Path):
    with pytest.raises(errors.StoreError, match=r"absent.*directory that does not exist"):
        engines.open_ledger(tmp_path / "absent" / "ledger.db")


def test_unknown_engine_is_refused_without_repeating_the_password():
    with pytest.raises(errors.ConfigError, match="'mysql'") as caught:
        engines.open_ledger("mysql://user:secret@host/db")

    assert "secret" not in str(caught.value)


def test_unreachable_server_is_a_store_error_without_the_password():
    with pytest.raises(errors.StoreError, match="Connection refused") as caught:
        engines.open_ledger("postgresql://user:secret@127.0.0.1:1/db?password=secret")

    assert "secret" not in str(caught.value)


def test_postgres_without_psycopg_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(errors.StoreError, match=r"pip install 'atoll\[postgres\]'"):
        engines.open_ledger("postgresql://127.0.0.1/db")


@pytest.mark.postgres
def test_postgres_names_the_process_that_holds_the_ledger(postgres_url: str):
    ledger = engines.open_ledger(postgres_url)

    with pytest.raises(errors.StateHeld, match=rf"'atoll pid {os.getpid()} on "):
        engines.open_ledger(postgres_url)

    ledger.close()


@pytest.mark.postgres
def test_postgres_ledger_stays_refused_when_its_session_was_ended(postgres_url: str):
    ledger = engines.open_ledger(postgres_url)
    end_sessions(postgres_url)
    with pytest.raises(errors.StoreError, match=r"connection .* was lost"):
        alone(ledger).members.register("a", "key", wall=0.0)

    with pytest.raises(errors.StoreError, match="restart this process"):
        alone(ledger).members.register("a", "key", wall=0.0)

    ledger.close()


def end_sessions(url: str) -> None:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.postgres
def test_postgres_sorts_every_text_column_by_code_point(postgres_url: str):
    engines.open_ledger(postgres_url).close()

    database = engines.open_database(postgres_url)
    with database.reading() as connection:
        collations = connection.rows(
            "SELECT DISTINCT collation_name FROM information_schema.columns "
            "WHERE table_schema = 'public' AND data_type = 'text'"
        )
    database.close()

    assert [tuple(row) for row in collations] == [("C",)]
