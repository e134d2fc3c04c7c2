"""Everything a person or a script reads: tables, JSON, log lines, one sentence for an error."""

import atexit
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.cli.repeats import Repeats
from atoll.clock import SystemClock
from atoll.errors import AtollError, ConfigError

# A pipe or file has no width: what it gets is not cut to that of a terminal.
_PIPED_COLUMNS = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 240

console = Console(highlight=False, width=_PIPED_COLUMNS)
stderr = Console(stderr=True, highlight=False)

_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class FieldsFormatter(logging.Formatter):
    """`time level sentence  key=value …`: the event text is constant, so it can be searched."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text + "".join(f"  {name}={value}" for name, value in fields_of(record).items())


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was said beside the event."""
    return {k: v for k, v in record.__dict__.items() if k not in _PLAIN_FIELDS}


_SERVING = ("asyncio", "uvicorn", "grpc")
LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(level: str) -> None:
    """Log lines on stderr, repeats counted; warnings of the libraries that serve among them."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level {level!r} is not known; use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldsFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    counted = Repeats(handler.handle, SystemClock(), fields_of=fields_of)
    handler.addFilter(counted)
    atexit.register(_tell_rest, counted, handler)
    for name, least in {"atoll": level.upper(), **dict.fromkeys(_SERVING, "WARNING")}.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
    logging.getLogger("atoll").propagate = False


def _tell_rest(counted: Repeats, handler: "logging.StreamHandler[TextIO]") -> None:
    if not handler.stream.closed:  # else nobody reads it
        counted.tell_rest()


def complain(error: AtollError) -> None:
    """One sentence on stderr."""
    stderr.print(plain(f"atoll: {error} [{error.code}]"), markup=False, soft_wrap=True)


def say(text: str) -> None:
    """A line for a person."""
    console.print(plain(text), markup=False, soft_wrap=True)


def plain(text: str) -> str:
    """`text` without anything that a terminal obeys: names and hosts are what workers say."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
    sys.stdout.flush()


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; the first column stands left, the others right as numbers do; None becomes "-"."""
    shown = None if title is None else escape(plain(title))
    made = Table(title=shown, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        # The first names a thing, and its name may be needed whole for the next command.
        made.add_column(
            column, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold"
        )
    for row in rows:
        made.add_row(*("-" if cell is None else Text(plain(str(cell))) for cell in row))
    return made


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def number(value: float | None, digits: int = 3) -> str | None:
    """A float for people; None stays None."""
    return None if value is None else f"{value:.{digits}f}"
