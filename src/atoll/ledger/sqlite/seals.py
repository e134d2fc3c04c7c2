"""Seals: the hash of every row beside the rows, so that changed bytes of the file do not go unseen.

SQLite has no checksum on the pages of its main file. A seal covers the rows of one table that
belong together (those of a round or a version, else one row by its key):

    total = sum over the rows of sha256(table, row), modulo 2^256

so a transaction moves it by the rows it changed and reads no others. What changed is recorded by
temporary triggers, which are this connection's own; a change from elsewhere leaves its seal behind.
The tables are read from the database itself. PostgreSQL has checksums of its own and is not sealed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from atoll.ledger.connection import DRIVER_ERRORS, Connection
from atoll.ledger.records import LedgerDamage

TABLE = "seals"
SCHEMA = "sqlite_schema"
# The columns by which rows of one table belong together, the first that a table has.
TOGETHER = ("round", "version")
# By table and what its rows are sealed with: how many rows, and their total.
Seals = dict[tuple[str, bytes], tuple[int, bytes]]
_CHANGES = "seal_changes"
_MODULUS = 1 << 256
_CHECKED_ERRORS = 100  # of the many that one torn page gives, more than anybody reads


class _Sealed(NamedTuple):
    """How the rows of one table are written out and put together."""

    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]  # the columns by which rows share a seal


def _exact(columns: Iterable[str], prefix: str = "") -> str:
    """SQL of these columns of a row as exact text, whatever is stored in them."""
    quoted = " || ',' || ".join(f'quote({prefix}"{name}")' for name in columns)
    return f"CAST({quoted} AS BLOB)"  # bytes that are no text any more must not be decoded


def watch(connection: Connection) -> None:
    """From here on changes of rows are noted; outside any transaction."""
    connection.rows("PRAGMA temp_store = MEMORY")
    made = [
        f"CREATE TEMP TABLE IF NOT EXISTS {_CHANGES} (place TEXT, key BLOB, gone BLOB, come BLOB)",
        *(line for sealed in _tables(connection) for line in _triggers(sealed)),
    ]
    connection.script(";\n".join(made))  # one call: a restart has a second for all it does


def begin(connection: Connection) -> None:
    """Drops notes of changes made outside our transactions, which must not be sealed."""
    connection.change(f"DELETE FROM temp.{_CHANGES}")


def end(connection: Connection) -> None:
    """Moves the seals by what this transaction changed."""
    changes = connection.rows(
        f"SELECT c.place, c.key, c.gone, c.come, s.count, s.total FROM temp.{_CHANGES} c "
        f"LEFT JOIN main.{TABLE} s ON s.place = c.place AND s.key = c.key"
    )
    moved: dict[tuple[str, bytes], list[int]] = {}
    for place, key, gone, come, count, total in changes:
        held = [0, 0] if count is None else [count, int.from_bytes(total, "big")]
        seal = moved.setdefault((place, bytes(key)), held)
        for row, sign in ((gone, -1), (come, 1)):
            if row is not None:
                seal[0], seal[1] = seal[0] + sign, seal[1] + sign * _hash(place, row)
    kept = [(*at, count, _bytes(total)) for at, (count, total) in moved.items() if count]
    ended = [at for at, (count, _) in moved.items() if not count]
    connection.change_each(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?, ?, ?)", kept)
    connection.change_each(f"DELETE FROM {TABLE} WHERE place = ? AND key = ?", ended)


def make(connection: Connection) -> None:
    """Makes the table and seals what is there."""
    connection.change(
        f"CREATE TABLE {TABLE} (place TEXT NOT NULL, key BLOB NOT NULL, "
        f"count BIGINT NOT NULL, total BLOB NOT NULL, PRIMARY KEY (place, key))"
    )
    renew(connection)


def renew(connection: Connection) -> None:
    """Seals every row as it is now, damaged or not."""
    connection.change(f"DELETE FROM {TABLE}")
    found = _computed_of_schema(connection)
    for sealed in _tables(connection):
        found |= _computed_of(connection, sealed)
    values = [(*at, *seal) for at, seal in found.items()]
    connection.change_each(f"INSERT INTO {TABLE} VALUES (?, ?, ?, ?)", values)


def check(connection: Connection) -> list[LedgerDamage]:
    """What is no longer as it was written: pages that cannot be read, rows that changed."""
    try:
        lines = connection.rows(f"PRAGMA integrity_check({_CHECKED_ERRORS})")
        found = [str(line) for [line] in lines]
    except DRIVER_ERRORS as error:
        found = [str(error)]
    torn = [LedgerDamage(place="", key="", reason=line) for line in found if line != "ok"]
    return [*torn, *broken(connection)]


def broken(connection: Connection) -> Iterator[LedgerDamage]:
    """Groups of rows that are not as their seals say."""
    try:
        stored = {
            (str(place), bytes(key)): (count, bytes(total))
            for place, key, count, total in connection.rows(
                f"SELECT CAST(place AS TEXT), key, count, total FROM {TABLE} NOT INDEXED"
            )
        }
    except (*DRIVER_ERRORS, TypeError) as error:
        yield LedgerDamage(place=TABLE, key="", reason=str(error))
        return
    unreadable = set()
    found = _computed_of_schema(connection)
    for sealed in _tables(connection):
        try:
            found |= _computed_of(connection, sealed)
        except (*DRIVER_ERRORS, TypeError) as error:
            unreadable.add(sealed.table)
            yield LedgerDamage(place=sealed.table, key="", reason=str(error))
    for place, key in sorted({*stored, *found}):
        mine, theirs = found.get((place, key)), stored.get((place, key))
        if mine != theirs and place not in unreadable:
            yield LedgerDamage(
                place=place,
                key=key.decode(errors="replace"),
                reason=f"expected {_told(theirs)}, found {_told(mine)}",
                is_sealed=theirs is not None,
            )


def _told(seal: tuple[object, bytes] | None) -> str:
    return "none" if seal is None else f"{seal[0]} rows with seal {seal[1].hex()}"


def _computed_of(connection: Connection, sealed: _Sealed) -> Seals:
    """The seals that the rows of one table have now."""
    hashes: defaultdict[bytes, list[int]] = defaultdict(list)
    # Not by an index: what counts is the row.
    table, columns, key = sealed
    rows = f'SELECT {_exact(key)}, {_exact(columns)} FROM "{table}" NOT INDEXED'
    for group, row in connection.rows(rows):
        hashes[bytes(group)].append(_hash(table, row))
    return {(table, group): (len(each), _bytes(sum(each))) for group, each in hashes.items()}


def _computed_of_schema(connection: Connection) -> Seals:
    """The seals of the statements that made the tables.

    Not of the pages where tables begin: those numbers are for the integrity check.
    """
    rows = connection.rows(
        "SELECT CAST(type || ' ' || name AS BLOB), CAST(quote(sql) AS BLOB) FROM main.sqlite_master"
    )
    return {(SCHEMA, bytes(key)): (1, _bytes(_hash(SCHEMA, text))) for key, text in rows}


def _bytes(total: int) -> bytes:
    return (total % _MODULUS).to_bytes(32, "big")


def _hash(place: str, row: bytes) -> int:
    return int.from_bytes(hashlib.sha256(place.encode() + b"\0" + bytes(row)).digest(), "big")


def _tables(connection: Connection) -> list[_Sealed]:
    described = connection.rows(
        "SELECT t.name, c.name, c.pk "
        "FROM main.sqlite_master t, pragma_table_info(t.name, 'main') c "
        "WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' AND t.name <> ? "
        "ORDER BY t.name, c.cid",
        (TABLE,),
    )
    return [_sealed(str(name), list(rows)) for name, rows in groupby(described, lambda row: row[0])]


def _sealed(table: str, described: Sequence[Sequence[Any]]) -> _Sealed:
    columns = tuple(str(name) for _, name, _ in described)
    together = [name for name in TOGETHER if name in columns][:1]
    key = [str(name) for _, name, place in sorted(described, key=lambda row: row[2]) if place]
    return _Sealed(table, columns, tuple(together or key or columns))


def _triggers(sealed: _Sealed) -> Iterator[str]:
    table, columns, key = sealed
    gone = f"SELECT '{table}', {_exact(key, 'OLD.')}, {_exact(columns, 'OLD.')}, NULL"
    come = f"SELECT '{table}', {_exact(key, 'NEW.')}, NULL, {_exact(columns, 'NEW.')}"
    events = {"INSERT": come, "DELETE": gone, "UPDATE": f"{gone} UNION ALL {come}"}
    for event, select in events.items():
        yield f'DROP TRIGGER IF EXISTS temp."seal_{event}_{table}"'
        yield (
            f'CREATE TEMP TRIGGER "seal_{event}_{table}" AFTER {event} ON main."{table}" '
            f"BEGIN INSERT INTO {_CHANGES} {select}; END"
        )
