"""A PostgreSQL ledger's database: every write is checked against who holds it."""

import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress

from atoll.errors import StoreError
from atoll.ledger.connection import DRIVER_ERRORS, Connection, Mode
from atoll.ledger.database import Database, lost
from atoll.ledger.postgres import epochs
from atoll.ledger.postgres.epochs import Epoch


class PostgresDatabase(Database):
    """The database on a server; `connect` makes one more connection to it.

    Safe to share, also with the thread of its own that renews the hold; it is held before a second
    thread has it.
    """

    def __init__(
        self, connection: Connection, *, name: str, connect: Callable[[], Connection]
    ) -> None:
        super().__init__(connection, name=name)
        self._connect = connect
        self._epoch: Epoch | None = None
        self._stop_renewing: Callable[[], None] = lambda: None
        self._is_closing = False

    def hold(self, *, lease_seconds: float) -> None:
        """Takes the ledger for this process and keeps it: every write from here on is checked."""
        self._epoch = epochs.take(self, lease_seconds=lease_seconds)
        self._stop_renewing = epochs.keep_renewing(self, lease_seconds=lease_seconds)

    @property
    def identity(self) -> str | None:
        return None if self._epoch is None else f"{self._epoch.ledger} in PostgreSQL"

    def has_table(self, name: str) -> bool:
        return self.connection.value("SELECT to_regclass(%s)", (name,)) is not None

    def _begin(self, mode: Mode) -> None:
        self.connection.begin(mode, None)  # the driver begins with the first statement
        if self._epoch is not None and mode is Mode.WRITING:
            self._epoch.check(self.connection)

    def check_held(self) -> None:
        with self.writing():
            pass

    def _why_lost(self) -> StoreError:
        """Another holder if there is one, else only that the connection is gone."""
        if self._epoch is not None and not self._is_closing:
            with suppress(*DRIVER_ERRORS), closing(self._connect()) as asking:
                asking.begin(Mode.READING, None)
                return self._epoch.overtaken(asking) or lost(self.name)
        return lost(self.name)

    def _closing(self) -> None:
        self._stop_renewing()
        self._is_closing = True

    def _hang_up(self) -> None:
        """Shuts the socket down, which ends the call that waits on it.

        If that call was a commit, it may or may not have counted: the next start reads which.
        """
        if self.connection.is_broken:
            return
        number = os.dup(self.connection.driver.pgconn.socket)
        with suppress(OSError), socket.socket(fileno=number) as line:
            line.shutdown(socket.SHUT_RDWR)
