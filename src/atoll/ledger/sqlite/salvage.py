"""Copies what can be read of a damaged SQLite ledger into a new one, as far as it is trusted.

Rows that are not as their seals say do not come along, and with a round's rows goes every round
after it. Reads the damaged file only through SQLite, whose own errors end a table early: then it is
read from its other end too. The damaged file should be a copy, since SQLite folds its log into it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.ledger import migrations
from atoll.ledger.connection import Connection
from atoll.ledger.records import LedgerDamage
from atoll.ledger.sqlite import connect, seals, truncation
from atoll.ledger.tables import schema
from atoll.ledger.tables.transaction import Transaction

OF_ROUNDS = ("rounds", "leases", "contributions", "checkpoints")
# Tables on which no weights depend, with the column that names a row: a damaged row is left out.
OF_OTHERS = {
    "snapshots": "version",
    "evaluations": "version",
    "credentials": "role",
    "control": "name",
    "generations": "number",
    "publishers": "worker_id",  # told again when it registers
    "announcements": "round",  # the audit then says that there is no statement
    "skips": "round",
    "datasets": "dataset_id",  # made again from the manifest
    "queues": "name",  # made again from the leases
    "groups": "number",
    "parts": "round",  # uploaded again
}
SAVES = "saves"  # all go with one: ranks go back to the checkpoint


@dataclass(frozen=True)
class Counts:
    """How much a ledger holds."""

    rounds: int = 0
    contributions: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass
class Salvaged:
    """What could be read, and what of it is not as it was written."""

    damages: list[LedgerDamage] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    published: int = 0  # the newest published round that could be read at all


def salvage(source: Path, target: Path, *, name: str) -> Salvaged:
    """Fills a new ledger at `target` from `source`, a copy of a damaged one.

    `name` is how messages call the original. LedgerVersion when another release wrote it.
    """
    found = Salvaged()
    _check_version(source, name=name)
    database = connect.open_file(str(target))
    try:
        migrations.migrate(database)
        database.unseal()
        with database.bare() as connection:
            # A row may have lost what it refers to; whether the rest stands is for the chain.
            connection.rows("PRAGMA foreign_keys = OFF")
        with database.writing() as connection:
            with contextlib.closing(_open(source)) as raw:
                _copy(raw, connection)
            t = Transaction(connection)
            found.published = published(t)
            found.counts = counts(t)
            found.damages = [
                damage
                for damage in seals.broken(connection)
                if damage.place not in (seals.SCHEMA, schema.schema_version.name)
            ]
            # What has no seal is for the chain alone to judge.
            _leave_out(t, [damage for damage in found.damages if damage.is_sealed])
            seals.renew(connection)
    finally:
        database.close()
    return found


def counts(t: Transaction) -> Counts:
    """How much there is, whatever may be wrong with it."""
    published = t.connection.value("SELECT count(*) FROM rounds WHERE state = 'published'")
    accepted = [
        [int(number or 0) for number in row]
        for table in ("contributions", "checkpoints")  # a run has either
        for row in t.connection.rows(f"SELECT count(*), sum(rows), sum(tokens) FROM {table}")
    ]
    return Counts(int(published), *map(sum, zip(*accepted, strict=True)))


def integrity(source: Path) -> list[str]:
    """What SQLite finds wrong with the file; empty when nothing."""
    driver = connect.driver()
    try:
        with contextlib.closing(_open(source)) as raw:
            lines = [str(row[0]) for row in raw.execute("PRAGMA integrity_check(10)")]
    except driver.Error as error:
        lines = [str(error)]
    return [line.strip().replace("\n", "; ") for line in lines if line != "ok"]


def _open(path: Path) -> Any:
    opened = connect.driver().connect(str(path))
    # What is no text any more differs from its seal either way.
    opened.text_factory = lambda data: data.decode(errors="replace")
    return opened


def _check_version(source: Path, *, name: str) -> None:
    """LedgerVersion for a ledger of another version; one whose version is unreadable passes."""
    driver = connect.driver()
    with contextlib.closing(_open(source)) as raw, contextlib.suppress(driver.Error):
        versions = [row[0] for row in raw.execute("SELECT version FROM schema_version")]
        if len(versions) == 1 and isinstance(versions[0], int) and versions[0] > 0:
            migrations.check_version(versions[0], name=name)


def _copy(raw: Any, sink: Connection) -> None:
    names = sink.rows(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    for table in sorted({name for [name] in names} - {schema.schema_version.name}):
        columns = [row[1] for row in sink.rows(f'PRAGMA table_info("{table}")')]
        sink.change(f'DELETE FROM "{table}"')
        places = ", ".join("?" * len(columns))
        quoted = ", ".join(f'"{name}"' for name in columns)
        for row in _rows(raw, table, quoted):
            sink.change(f'INSERT OR IGNORE INTO "{table}" ({quoted}) VALUES ({places})', row)


def _rows(raw: Any, table: str, columns: str) -> Iterator[tuple[object, ...]]:
    """Every row that can be read, from both ends of the table."""
    driver = connect.driver()
    seen = set()
    for order in ("ASC", "DESC"):
        statement = f'SELECT rowid, {columns} FROM "{table}" NOT INDEXED ORDER BY rowid {order}'
        with contextlib.suppress(driver.Error):
            for number, *row in raw.execute(statement):
                if number not in seen:
                    seen.add(number)
                    yield tuple(row)
            return


def published(t: Transaction) -> int:
    """The newest published round; 0 without one."""
    found = t.connection.value(
        "SELECT max(round) FROM rounds WHERE state = 'published' AND typeof(round) = 'integer'"
    )
    return int(found or 0)


def _leave_out(t: Transaction, damages: list[LedgerDamage]) -> None:
    for damage in damages:
        if damage.place == SAVES:
            t.connection.change(f'DELETE FROM "{SAVES}"')
        if damage.place in OF_OTHERS:
            is_it = f'quote("{OF_OTHERS[damage.place]}") = ?'
            t.connection.change(f'DELETE FROM "{damage.place}" WHERE {is_it}', (damage.key,))
    numbered = [(d.place, int(d.key)) for d in damages if d.key.isdecimal()]
    rounds = [number for place, number in numbered if place in OF_ROUNDS]
    rounds += _without(t.connection, [number for place, number in numbered if place == "manifests"])
    if rounds:
        last = min(min(rounds) - 1, published(t))
        truncation.truncate(t, last_round=last)
    for damage in damages:
        if damage.place == "workers":
            _renew_worker(t.connection, damage.key.strip("'"))


def _without(connection: Connection, manifests: list[int]) -> list[int]:
    """Deletes these damaged manifest versions and all later ones; gives the first round under them.

    The first version stays: without it there is no run, and the check of the chain finds that.
    """
    later = [version for version in manifests if version > 1]
    if not later:
        return []
    connection.change("DELETE FROM manifests WHERE version >= ?", (min(later),))
    first = connection.value(
        "SELECT min(round) FROM rounds WHERE manifest_sha256 NOT IN (SELECT sha256 FROM manifests)"
    )
    return [] if first is None else [int(first)]


def _renew_worker(connection: Connection, name: str) -> None:
    """Replaces a damaged row of a worker.

    It becomes inactive and its key is forgotten, so that any process may register under the name;
    its incarnation is the highest that is recorded.
    """
    lives = connection.value(
        "SELECT max(incarnation) FROM (SELECT incarnation FROM contributions WHERE worker_id = ? "
        "UNION ALL SELECT incarnation FROM workers WHERE worker_id = ?) "
        "WHERE typeof(incarnation) = 'integer'",
        (name, name),
    )
    renewed = (name, "0" * 64, lives or 1)
    connection.change("INSERT OR REPLACE INTO workers VALUES (?, ?, ?, 0, 0.0)", renewed)
