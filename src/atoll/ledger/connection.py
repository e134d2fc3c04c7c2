"""A driver's connection: statements are compiled once, and every driver's errors are of one kind.

A statement is text for the driver, or built with SQLAlchemy Core. A built one is compiled to text
the first time and kept for the life of the process, so it must be a constant of its module.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any, Protocol

from sqlalchemy import Executable
from sqlalchemy.engine import Dialect

from atoll.errors import StoreError

Row = tuple[Any, ...]
Values = Mapping[str, object] | Sequence[object]

# Rows held in memory at a time.
BATCH = 500


class DriverError(Exception):
    """What a driver reported; its own first line is the message."""

    def __init__(
        self, cause: Exception, *, breaks_schema: bool = False, is_disconnect: bool = False
    ) -> None:
        super().__init__(str(cause).strip().partition("\n")[0])
        self.breaks_schema = breaks_schema
        self.is_disconnect = is_disconnect
        self.sqlstate: str | None = getattr(cause, "sqlstate", None)


# Every error that using a connection can raise. sqlite3 raises OverflowError for a number beyond 64
# bits, and UnicodeDecodeError where a damaged value, or its own message about it, is not UTF-8.
DRIVER_ERRORS = (DriverError, OverflowError, UnicodeDecodeError)


class Mode(Enum):
    """What a connection may be used for now."""

    IDLE = "idle"
    READING = "reading"
    WRITING = "writing"
    BARE = "bare"  # outside any transaction


class Watcher(Protocol):
    """A listener that is told of every statement; if it raises, the transaction is undone."""

    def before(self, text: str) -> None: ...

    def after(self, text: str) -> None: ...

    def commit(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: str
    names: tuple[str, ...]  # of its parameters, in the order of their places
    fixed: dict[str, object]  # values that stand in the statement itself
    by_name: bool  # whether the driver takes a mapping


class Connection:
    """The one connection of a ledger, around the driver's own (`driver`).

    Used by one thread at a time: `Database` hands it out under its lock.
    """

    watcher: Watcher | None = None

    def __init__(self, driver: Any, module: ModuleType, dialect: Dialect) -> None:
        self.driver = driver
        self.dialect = dialect
        self.engine = dialect.name
        self.mode = Mode.IDLE
        self.is_closed = False
        self._module = module

    @property
    def is_broken(self) -> bool:
        """Whether the server hung up."""
        return bool(getattr(self.driver, "broken", False))

    # Reading

    def rows(self, statement: Executable | str, values: Values = ()) -> list[Row]:
        """All rows that the statement gives."""
        with self._reporting():
            found: list[Row] = self._execute(statement, values).fetchall()
        return found

    def row(self, statement: Executable | str, values: Values = ()) -> Row | None:
        """The first row, or None."""
        found = self.rows(statement, values)
        return found[0] if found else None

    def value(self, statement: Executable | str, values: Values = ()) -> Any:
        """The first column of the first row; None without a row."""
        found = self.rows(statement, values)
        return found[0][0] if found else None

    def stream(self, statement: Executable | str) -> Generator[Row, None, None]:
        """All rows, read as they are used."""
        text, given = self._bound(statement, ())
        # A cursor of psycopg with a name stays on the server; one without has all rows at once.
        cursor = self.driver.cursor(*(("stream",) if self.engine == "postgresql" else ()))
        with closing(cursor), self._reporting():
            self._watched(text, lambda: cursor.execute(text, given))
            while found := cursor.fetchmany(BATCH):
                yield from found

    # Writing

    def change(self, statement: Executable | str, values: Values = ()) -> int:
        """Executes a statement that changes rows or tables; how many rows it changed."""
        self._check_writable()
        return int(self._execute(statement, values).rowcount)

    def change_each(self, statement: Executable | str, values: Sequence[Values]) -> None:
        """Executes the same statement with each of `values`; nothing when there are none."""
        if not values:
            return
        self._check_writable()
        text, first = self._bound(statement, values[0])
        given = [first, *(self._bound(statement, each)[1] for each in values[1:])]
        self._watched(text, lambda: self.driver.cursor().executemany(text, given))

    def script(self, text: str) -> None:
        """Executes several statements at once; SQLite only, outside any transaction."""
        assert self.mode is Mode.BARE, self.mode
        self.driver.executescript(text)

    def _check_writable(self) -> None:
        if self.mode is Mode.READING:
            asked = "a transaction that reads was asked to change the ledger"
            raise StoreError(f"{asked}; use `ledger.writing()`")

    # Transactions

    def begin(self, mode: Mode, text: str | None) -> None:
        """Begins a transaction; `text` does it where the driver does not begin by itself."""
        self.mode = mode
        if text is not None:
            self._execute(text, ())

    def commit(self) -> None:
        """Makes what was changed durable."""
        if self.watcher is not None and self.mode is Mode.WRITING:
            self.watcher.commit()
        with self._reporting():
            self.driver.commit()
        self.mode = Mode.IDLE

    def rollback(self) -> None:
        """Undoes what was changed; harmless where nothing was, or where nobody answers."""
        self.mode = Mode.IDLE
        try:
            self.driver.rollback()
        except self._module.Error:
            return  # it is undone by the database

    def close(self) -> None:
        """Gives the connection back."""
        self.is_closed = True
        self.driver.close()

    # Inside

    def _execute(self, statement: Executable | str, values: Values) -> Any:
        assert self.mode is not Mode.IDLE, "a transaction's rows are read and changed inside it"
        text, given = self._bound(statement, values)
        return self._watched(text, lambda: self.driver.execute(text, given))

    def _watched(self, text: str, run: Any) -> Any:
        if self.watcher is not None:
            self.watcher.before(text)
        with self._reporting():
            cursor = run()
        if self.watcher is not None:
            self.watcher.after(text)
        return cursor

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turns the driver's errors into those that the ledger knows."""
        try:
            yield
        except self._module.Error as exc:
            is_breach = isinstance(exc, self._module.IntegrityError)
            raise DriverError(exc, breaks_schema=is_breach, is_disconnect=self.is_broken) from exc

    def _bound(self, statement: Executable | str, values: Values) -> tuple[str, Any]:
        """The text of a statement, and its parameters as the driver takes them."""
        if isinstance(statement, str):
            return statement, values
        given: Mapping[str, object] = values if isinstance(values, Mapping) else {}
        compiled = _compile(statement, tuple(given), self.dialect)
        merged = {**compiled.fixed, **given}
        if compiled.by_name:
            return compiled.text, {name: merged[name] for name in compiled.names}
        return compiled.text, [merged[name] for name in compiled.names]


@cache
def _compile(statement: Executable, keys: tuple[str, ...], dialect: Dialect) -> _Compiled:
    """Compiles to text; an INSERT or UPDATE sets the columns that `keys` names."""
    made: Any = statement.compile(  # type: ignore[attr-defined]  # of every statement we build
        dialect=dialect, column_keys=list(keys), compile_kwargs={"render_postcompile": True}
    )
    parameters = made.construct_params(dict.fromkeys(keys), escape_names=False)
    fixed = {name: value for name, value in parameters.items() if name not in keys}
    names = made.positiontup or tuple(parameters)
    return _Compiled(str(made), tuple(names), fixed, by_name=made.positiontup is None)
