"""The history of telemetry: a file of its own, bounded, never part of the model.

Losing it loses no work, so it is neither synced nor part of the ledger; a damaged file is put
aside and a new one begun.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from atoll.protocol.messages import Identity
from atoll.protocol.samples import MAX_PAGE, Sample, SampleHistory, StoredSample

log = logging.getLogger(__name__)

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

    def add(self, identity: Identity, samples: Sequence[Sample]) -> None:
        """Keeps what is new of `samples`; the oldest of all go when there are too many.

        Where the disk takes none they are lost, and nothing else is.
        """
        try:
            self._add(identity, samples)
        except sqlite3.OperationalError as exc:
            log.warning("samples were not kept", extra={"reason": str(exc)})

    def _add(self, identity: Identity, samples: Sequence[Sample]) -> None:
        with self._lock, self._database:
            self._database.executemany(
                "INSERT OR IGNORE INTO samples (worker_id, incarnation, sequence, body) "
                "VALUES (?, ?, ?, ?)",
                [
                    (identity.worker_id, identity.incarnation, s.sequence, s.model_dump_json())
                    for s in samples
                ],
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
        with self._lock:
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
        return SampleHistory(
            samples=found,
            after=found[-1].position if found else after,
            kept=kept,
            limit=self._limit,
        )

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        return _connect(path)
    except sqlite3.DatabaseError as exc:
        assert path is not None, "a database in memory cannot be damaged"
        aside = path.with_name(path.name + ".damaged")
        os.replace(path, aside)
        log.warning(
            "the history of telemetry was damaged and begins anew",
            extra={"kept_as": str(aside), "reason": str(exc)},
        )
        return _connect(path)


def _connect(path: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
    try:
        database.execute("PRAGMA synchronous = OFF")
        database.execute(_TABLE)
        database.execute("SELECT max(position) FROM samples").fetchone()
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database
