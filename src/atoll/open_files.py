"""How many files this process may have open, and what it is called when it may open no more.

Too many open files, of this process or of the machine, and no memory for one more pass by
themselves: they are named like a full disk, which is waited for, and never like a failed one.
"""

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atoll.errors import Exhausted

log = logging.getLogger(__name__)

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LEAST_SHARE = 16
_MOST_SHARE = 4096


class Limit(NamedTuple):
    """The limit of open files that was, and the one that is in force."""

    before: int
    now: int


def raise_limit() -> Limit:
    """Raises this process's limit of open files to the most that it may have, and logs both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where the hard one is no number, some systems refuse it: what there is stays.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = Limit(soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    log.info("limit of open files", extra=limit._asdict())
    return limit


def share() -> int:
    """How many files one piece of work may hold open: a quarter of what the process may."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_SHARE
    return min(_MOST_SHARE, max(_LEAST_SHARE, soft // 4))


def check_some(count: int) -> None:
    """Exhausted unless `count` more files could be opened just now."""
    with contextlib.ExitStack() as opened, scarce("open", Path(os.devnull)):
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def is_one_left() -> bool:
    """Whether a file can be opened just now."""
    try:
        check_some(1)
    except Exhausted:
        return False
    return True


@contextlib.contextmanager
def scarce(action: str, path: Path) -> Iterator[None]:
    """Turns the OSErrors that pass by themselves into Exhausted; others go through."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in EXHAUSTED:
            raise
        raise Exhausted(
            f"cannot {action} {str(path)!r} now: {exc.strerror}; it is tried again until files and "
            f"memory are free, and a higher `ulimit -n` gives more of them"
        ) from exc
