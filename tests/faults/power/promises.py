"""What the recorded run promised, as marks in its trace, and what it is to break one.

Every mark names the machine whose disk has to keep it:

    coordinator   created, joined, received, published, finished, pinned
    island-N      identity, saved, promoted
    operator      exported, streamed, copied
    rank          held, dropping
    gatherer      key, stands, left, gathered
    bucket        stated, recorded
    store         stored
    elsewhere     placed
    repaired      damaged, noted, repaired
    reset         told, dropped
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Mark = dict[str, Any]


class Broken(Exception):
    """Something that was promised does not hold."""


def values(promised: Sequence[Mark], name: str) -> Iterator[Any]:
    """What was promised under that name, in order."""
    return (mark[name] for mark in promised if name in mark)


def same(what: str, found: object, expected: object) -> None:
    """Raises Broken unless both are equal."""
    if found != expected:
        raise Broken(f"{what} is {found!r}, it was {expected!r}")


def sha256_of(path: Path) -> str | None:
    """Of a file, or None when there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
