"""A PostgreSQL ledger's database: every write is checked against who holds it."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from atoll.errors import StoreError
from atoll.ledger.connection import DRIVER_ERRORS, Connection, Mode
from atoll.ledger.database import Database, lost


class Right(Protocol):
    """What allows this process to write; see `epochs`."""

    def check(self, connection: Connection) -> None:
        """Superseded unless the right stands until the transaction's end."""
        ...

    def overtaken(self, connection: Connection) -> StoreError | None:
        """Who has it now, when it is lost."""
        ...


class PostgresDatabase(Database):
    """The database on a server; `connect` makes one more connection to it."""

    def __init__(
        self, connection: Connection, *, name: str, connect: Callable[[], Connection]
    ) -> None:
        super().__init__(connection, name=name)
        self._connect = connect
        self._right: Right | None = None
        self._identity: str | None = None
        self._on_close: Callable[[], None] = lambda: None
        self._is_closing = False

    def guard(self, right: Right, *, identity: str, on_close: Callable[[], None]) -> None:
        """From here on every writing transaction begins with a check of `right`."""
        self._right, self._identity, self._on_close = right, identity, on_close

    @property
    def identity(self) -> str | None:
        return self._identity

    def has_table(self, name: str) -> bool:
        return self.connection.value("SELECT to_regclass(%s)", (name,)) is not None

    def _begin(self, mode: Mode) -> None:
        self.connection.begin(mode, None)  # the driver begins with the first statement
        if self._right is not None and mode is Mode.WRITING:
            self._right.check(self.connection)

    def check_held(self) -> None:
        with self.writing():
            pass

    def _why_lost(self) -> StoreError:
        """Another holder if there is one, else only that the connection is gone."""
        if self._right is not None and not self._is_closing:
            try:
                asking = self._connect()
                asking.begin(Mode.READING, None)
                overtaken = self._right.overtaken(asking)
                asking.close()
            except DRIVER_ERRORS:
                overtaken = None
            if overtaken is not None:
                return overtaken
        return lost(self.name)

    def _closing(self) -> None:
        self._on_close()
        self._is_closing = True

    def _hang_up(self) -> None:
        """Whether the commit of the call that it ends counted, the next start reads."""
        if self.connection.is_broken:
            return
        number = os.dup(self.connection.driver.pgconn.socket)
        with suppress(OSError), socket.socket(fileno=number) as line:
            line.shutdown(socket.SHUT_RDWR)
