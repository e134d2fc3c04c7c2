"""The history of telemetry: a file of its own, bounded, never part of the model.

Losing it loses no work, so it is neither synced nor part of the ledger; a damaged file is put
aside and a new one begun.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from atoll import open_files
from atoll.errors import Exhausted, StorageFull, StoreError
from atoll.protocol.samples import MAX_PAGE, Sample, SampleHistory, StoredSample

log = logging.getLogger(__name__)

_NO_FILE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
KEPT_SAMPLES = 200_000  # about 50 MB
_TABLE = """CREATE TABLE IF NOT EXISTS samples (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    worker_id TEXT NOT NULL, incarnation INTEGER NOT NULL, sequence INTEGER NOT NULL,
    body TEXT NOT NULL, UNIQUE (worker_id, incarnation, sequence))"""


class SampleStore:
    """Samples of all workers, the newest `limit` of them. Thread-safe."""

    def __init__(self, path: Path | None = None, *, limit: int = KEPT_SAMPLES) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._database = _opened(path)

    def add(self, worker_id: str, life: int, samples: Sequence[Sample]) -> None:
        """Keeps what is new of `samples`; the oldest of all go when there are too many.

        StorageFull, and nothing of it is kept, when the disk does not take it.
        """
        with _typed(), self._lock, self._database:
            self._database.executemany(
                "INSERT OR IGNORE INTO samples (worker_id, incarnation, sequence, body) "
                "VALUES (?, ?, ?, ?)",
                [(worker_id, life, s.sequence, s.model_dump_json()) for s in samples],
            )
            self._database.execute(
                "DELETE FROM samples WHERE position <= (SELECT max(position) FROM samples) - ?",
                (self._limit,),
            )

    def history(
        self, *, worker_id: str | None = None, after: int = 0, limit: int = 1000
    ) -> SampleHistory:
        """Samples in the order they came, from the first after position `after`."""
        where, values = ("AND worker_id = ?", [worker_id]) if worker_id is not None else ("", [])
        with _typed(), self._lock:
            rows = self._database.execute(
                f"SELECT position, worker_id, incarnation, body FROM samples "
                f"WHERE position > ? {where} ORDER BY position LIMIT ?",
                [after, *values, min(limit, MAX_PAGE)],
            ).fetchall()
            [kept] = self._database.execute("SELECT count(*) FROM samples").fetchone()
        found = tuple(
            StoredSample(position=position, worker_id=name, incarnation=life, **json.loads(body))
            for position, name, life, body in rows
        )
        reached = found[-1].position if found else after
        return SampleHistory(samples=found, after=reached, kept=kept, limit=self._limit)

    def close(self) -> None:
        with self._lock:
            self._database.close()


@contextmanager
def _typed(*, is_in_use: bool = True) -> Iterator[None]:
    """Turns what the database says into errors of this tree.

    Once it `is_in_use`, only too many open files keep it from making the file that undoes a
    transaction; before, its path may be wrong too.
    """
    try:
        yield
    except MemoryError as exc:
        raise _exhausted("no memory") from exc
    except sqlite3.Error as exc:
        # The low byte is the kind: an I/O error has one code for each call of the system.
        kind = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if kind in _NO_FILE and (is_in_use or not open_files.is_one_left()):
            raise _exhausted(str(exc)) from exc
        if kind in _NO_ROOM:
            raise StorageFull(
                f"the history of telemetry cannot be written ({exc}); free some room on the "
                f"coordinator's disk, what was measured is sent again"
            ) from exc
        raise StoreError(
            f"the history of telemetry cannot be used ({exc}); restart the coordinator, which "
            f"puts a damaged file aside"
        ) from exc


def _exhausted(said: str) -> Exhausted:
    return Exhausted(
        f"the history of telemetry found no file or memory free ({said}); nothing of it is lost, "
        f"what was measured is sent again"
    )


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        return _connect(path)
    except StorageFull:
        raise
    except StoreError as exc:
        assert path is not None, "a database in memory cannot be damaged"
        aside = path.with_name(path.name + ".damaged")
        os.replace(path, aside)
        log.warning(
            "the history of telemetry was damaged and begins anew",
            extra={"kept_as": str(aside), "reason": str(exc.__cause__)},
        )
        return _connect(path)


def _connect(path: Path | None) -> sqlite3.Connection:
    with _typed(is_in_use=False), ExitStack() as undo:
        database = sqlite3.connect(path or ":memory:", check_same_thread=False)
        undo.callback(database.close)
        database.execute("PRAGMA synchronous = OFF")
        database.execute(_TABLE)
        database.execute("SELECT max(position) FROM samples").fetchone()
        undo.pop_all()
    return database
