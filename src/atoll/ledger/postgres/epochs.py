"""Who holds a PostgreSQL ledger: one process at a time, by an epoch that only grows.

One row, outside the ledger's own tables, says which epoch is in force, whose it is and until when.
A holder renews its lease by the database's clock and, inside every writing transaction, finds its
own epoch there under a lock that a take-over needs for itself: a late write is refused whole. An
advisory lock of the session, one for each epoch, tells a dead holder from a silent one.
"""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from atoll.errors import StateHeld, StoreError, Superseded
from atoll.ledger.connection import Connection, DriverError
from atoll.ledger.database import Database

LEASE_SECONDS = 15.0
RENEWALS = 3  # in the time of one lease
# The session of a killed process takes a moment to end.
GONE_SECONDS = 1.0
# Any constant does as long as nobody else uses it: the first 8 bytes of sha256("atoll ledger").
ADVISORY_KEY = 0x3EFF3A682FC2EE6C
TABLE = "holder"

_LOCK_NOT_AVAILABLE = "55P03"
_MAKE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    id SMALLINT NOT NULL PRIMARY KEY CHECK (id = 1),
    ledger TEXT COLLATE "C" NOT NULL,
    epoch BIGINT NOT NULL,
    holder TEXT COLLATE "C" NOT NULL,
    since TIMESTAMPTZ NOT NULL,
    renewed TIMESTAMPTZ NOT NULL,
    lease_seconds DOUBLE PRECISION NOT NULL)"""
_READ = (
    f"SELECT ledger, epoch, holder, since, lease_seconds, "
    f"EXTRACT(EPOCH FROM clock_timestamp() - renewed)::double precision FROM {TABLE}"
)
_TAKE = (
    f"INSERT INTO {TABLE} (id, ledger, epoch, holder, since, renewed, lease_seconds) "
    "VALUES (1, gen_random_uuid()::text, %(epoch)s, %(holder)s, clock_timestamp(), "
    "clock_timestamp(), %(lease)s) ON CONFLICT (id) DO UPDATE SET epoch = %(epoch)s, "
    "holder = %(holder)s, since = clock_timestamp(), renewed = clock_timestamp(), "
    "lease_seconds = %(lease)s"
)


class Holder(NamedTuple):
    """The one row: who holds the ledger."""

    ledger: str
    epoch: int
    name: str
    since: datetime
    lease_seconds: float
    silent_seconds: float

    @classmethod
    def read(cls, connection: Connection) -> "Holder | None":
        """The row as it is now; None where nobody ever held the ledger."""
        found = connection.row(_READ)
        return None if found is None else cls(*found)

    @property
    def is_live(self) -> bool:
        return self.silent_seconds <= self.lease_seconds

    def __str__(self) -> str:
        return f"{self.name!r} since {self.since:%Y-%m-%d %H:%M:%S %Z}"


def name_of_this_process() -> str:
    """How this process is called as a holder, in the errors of others and on the server."""
    return f"atoll pid {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True)
class Epoch:
    """One holder's right to write."""

    number: int
    ledger: str  # names the database, the same in every epoch
    name: str  # how messages call the ledger

    def check(self, connection: Connection) -> None:
        """Superseded unless this epoch is in force, and then until the transaction ends.

        The lock comes first: what is read after it cannot change before the commit.
        """
        connection.change(f"LOCK TABLE {TABLE} IN ROW SHARE MODE")
        over = self.overtaken(connection)
        if over is not None:
            raise over

    def overtaken(self, connection: Connection) -> Superseded | None:
        """Who holds the ledger now, as an error; None while this epoch is in force."""
        found = Holder.read(connection)
        if found is not None and found.epoch == self.number:
            return None
        now = "nobody" if found is None else f"{found}, epoch {found.epoch}"
        return Superseded(
            f"the ledger {self.name} was taken over and is held by {now}; this process held epoch "
            f"{self.number} and writes nothing more; it must stop, and islands go to the new one"
        )


def take(database: Database, *, lease_seconds: float) -> Epoch:
    """The next epoch for this process; StateHeld, naming the holder, while its lease is live."""
    with database.writing() as connection:
        connection.rows("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_KEY,))
        connection.change(_MAKE)
        # A server may default to acknowledging before its log is on disk.
        connection.change("SET synchronous_commit = on")
        # A holder that is stopped inside a transaction keeps its locks no longer than its lease.
        limit = _milliseconds(lease_seconds)
        connection.change(f"SET idle_in_transaction_session_timeout = {limit}")
    with database.writing() as connection:
        before = Holder.read(connection)
        # A lease that has run out needs no proof of a death.
        is_gone = before is None or (before.is_live and _session_ended(connection, before.epoch))
    if before is not None and not is_gone and before.is_live:
        raise _held(database.name, before)
    with database.writing() as connection:
        wait = lease_seconds if before is None else before.lease_seconds + 5.0
        # Waits for writes under way and keeps out every later one; see Epoch.check. Nothing before
        # it reads, so that what is read below is younger than the lock.
        locked = _in_time(connection, wait, f"LOCK TABLE {TABLE} IN EXCLUSIVE MODE")
        if not locked and before is not None:
            raise _held(database.name, before)
        found = Holder.read(connection)
        if found is not None:
            is_another = before is None or found.epoch != before.epoch  # a third was faster
            if is_another or (found.is_live and not is_gone):
                raise _held(database.name, found)
        number = 1 if found is None else found.epoch + 1
        values = {"epoch": number, "holder": name_of_this_process(), "lease": lease_seconds}
        connection.change(_TAKE, values)
        connection.rows("SELECT pg_advisory_lock(%s, %s)", _session_key(number))
        return Epoch(number, ledger=str(connection.value(_READ)), name=database.name)


def _session_ended(connection: Connection, epoch: int) -> bool:
    """Whether the session that held `epoch` is over: then its process can never write again."""
    lock = "SELECT pg_advisory_xact_lock(%s, %s)"
    return _in_time(connection, GONE_SECONDS, lock, _session_key(epoch))


def _in_time(
    connection: Connection, seconds: float, statement: str, values: tuple[int, ...] = ()
) -> bool:
    """Whether the statement got its lock within so many seconds.

    The limit is by SET: a query such as `set_config` would fix what the transaction sees before it
    has the lock.
    """
    connection.change(f"SET LOCAL lock_timeout = {_milliseconds(seconds)}")
    connection.change("SAVEPOINT waiting")
    try:
        connection.change(statement, values)
        return True
    except DriverError as exc:
        if exc.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        connection.change("ROLLBACK TO SAVEPOINT waiting")
        return False


def _session_key(epoch: int) -> tuple[int, int]:
    return ADVISORY_KEY >> 32, epoch & 0x7FFFFFFF


def _held(name: str, found: Holder) -> StateHeld:
    return StateHeld(
        f"the ledger {name} is held by {found}, epoch {found.epoch}, heard "
        f"{found.silent_seconds:.1f} s ago; only one coordinator may open it, so stop that one "
        f"first, or wait until it has been silent for {found.lease_seconds:g} s"
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def renew(connection: Connection) -> None:
    """Lets the lease begin anew; inside a writing transaction, which has checked the epoch."""
    connection.change(f"UPDATE {TABLE} SET renewed = clock_timestamp()")


def keep_renewing(database: Database, *, lease_seconds: float) -> Callable[[], None]:
    """Keeps the lease alive from a thread of its own, until the ledger is lost.

    Or until the function that it returns is called, which does not wait for the thread. The first
    renewal comes after a part of the lease.
    """
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(lease_seconds / RENEWALS):
            try:
                with database.writing() as connection:
                    renew(connection)
            except StoreError:
                if database.is_lost:
                    return  # and told by the database

    threading.Thread(target=run, name="ledger lease", daemon=True).start()
    return stopping.set
