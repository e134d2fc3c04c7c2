"""An island's own files while none can be opened: it waits, says so once, and tries again."""

import errno
import logging
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from atoll import open_files
from atoll.clock import Clock
from atoll.errors import Exhausted

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_NUMBER = re.compile(r"\((?:os error )?(\d+)\)")  # how safetensors and torch tell it

P = ParamSpec("P")
T = TypeVar("T")


class Kept(Protocol):
    """Files in a directory."""

    directory: Path
    clock: Clock


K = TypeVar("K", bound=Kept)


def patient(method: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """The method, tried again every second while no file can be opened.

    It must bear to be called again after it ended halfway. A disk that is full is another matter:
    room for an island does not come back by itself.
    """

    @wraps(method)
    def tried(self: K, /, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                with open_files.scarce("use", self.directory):
                    return method(self, *args, **kwargs)
            except Exhausted as error:
                log.warning("no file can be opened, waiting", extra={"reason": str(error)})
            self.clock.sleep(LOOK_SECONDS)

    return tried


def check(exc: Exception, path: Path) -> None:
    """Exhausted when this is why the file could not be used; else nothing."""
    said = _NUMBER.search(str(exc))
    number = int(said[1]) if said else getattr(exc, "errno", None)
    # It calls a file that it cannot open one that is not there.
    if number is None and not open_files.is_one_left():
        number = errno.EMFILE
    if number in open_files.EXHAUSTED:
        with open_files.scarce("use", path):
            raise OSError(number, os.strerror(number))
