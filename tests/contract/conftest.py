"""Ledgers for the suites of every engine: SQLite in a file, and PostgreSQL."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from atoll.ledger import engines, migrations
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.ledger.tables import schema
from tests import ledgers, servers
from tests.ledgers import MANIFEST, RUN, alone, lease, plan


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger that does not exist yet."""
    if engine == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "ledger.db")


@pytest.fixture(scope="session")
def reused_url(postgres_server: servers.RunningServer) -> str:
    """One PostgreSQL database for all tests that need no new one: making one is slow."""
    return servers.create_database(postgres_server, f"ledger_{os.getpid()}")


@pytest.fixture(scope="module")
def reused(reused_url: str) -> Iterator[Database]:
    database = engines.open_database(reused_url)
    migrations.migrate(database)
    yield database
    database.close()


@pytest.fixture
def ledger(engine: str, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """An open ledger without a record."""
    if engine == "postgres":
        database = request.getfixturevalue("reused")
        empty(database)
        yield Ledger(database)
    else:
        # In memory where there is such a directory: these tests wait for thousands of syncs.
        with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as where:
            opened = engines.open_ledger(Path(where) / "ledger.db")
            yield opened
            opened.close()


def empty(database: Database) -> None:
    with database.writing() as connection:
        for table in reversed(schema.metadata.sorted_tables):
            if table is not schema.schema_version:
                connection.change(table.delete())


@pytest.fixture
def started(ledger: Ledger) -> Ledger:
    """Round 1 open: `a` has rows 0-8, `b` has rows 8-16, `c` is registered without a lease."""
    alone(ledger).run.create(RUN, MANIFEST)
    for name in "abc":
        alone(ledger).members.register(name, f"key {name}", wall=5.0)
    ledgers.begin(ledger, plan(1, [lease(1, "a", 0, 8), lease(1, "b", 8, 16)]))
    return ledger
