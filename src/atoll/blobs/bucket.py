"""The bucket seam: objects that somebody else may write, replace or withhold.

Unlike a blob store, whose owner alone writes to it, a bucket is not trusted: an object is pinned by
its tag, its bytes are counted as they come, and every read ends at a deadline. Knows no server.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.errors import ObjectChanged, ObjectMissing, StoreError, StoreLate

PIECE_BYTES = 256 << 10  # what a reader holds of an object at a time
MAX_KEY = 1024  # S3's own limit
RULE = "words out of A-Z a-z 0-9 . _ - that do not start with . or -, joined by single slashes"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*\Z")


@dataclass(frozen=True, slots=True)
class Tag:
    """What pins one object: its size and its entity, which another object of that key lacks.

    `modified` is the server's time of it in seconds since 1970, None where it tells none.
    """

    nbytes: int
    entity: str
    modified: float | None = None


class Bucket(Protocol):
    """The objects of one bucket. Calls block; several threads may share one.

    `deadline` is in the time of the clock that the bucket was made with. What is not finished by
    then is cancelled and raises StoreLate. Other trouble is typed too: StoreAway when the server is
    away or overloaded and the same call may succeed later, ObjectRefused when it will not.
    """

    def look(self, key: str, *, deadline: float) -> Tag | None:
        """The tag of the object, or None when there is none."""
        ...

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        """The bytes from `start` to `stop` of the very object that `tag` pins, in order.

        Exactly `stop - start` bytes in pieces of at most `PIECE_BYTES`, or an error after the
        pieces that did arrive, so that a caller can go on behind them. ObjectMissing or
        ObjectChanged when it is gone or another one now; ObjectSize when the server sends more or
        fewer bytes. A piece is good until the next one is asked for. Closing the iterator early
        cancels the rest.
        """
        ...

    def put(self, key: str, source: bytes | Path) -> Tag:
        """Stores bytes, or a local file, whole; the tag that was found when it was looked up again.

        An object of that key is replaced. StoreError unless the size is the same afterwards.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Stores bytes where no object is; False, and nothing is changed, where one is.

        Of several writers at once exactly one gets True. After a StoreAway it is not known; ask
        again, and compare what is there.
        """
        ...

    def remove(self, key: str) -> None:
        """Removes an object; harmless when it is absent."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Every key below the folder `prefix`, in no particular order."""
        ...


def is_key(text: str) -> bool:
    """Whether `text` can be a key, or a folder of keys."""
    return len(text) <= MAX_KEY and _KEY.match(text) is not None


def check_key(text: str) -> None:
    """StoreError unless `text` is a key: so none leads out of its bucket, or needs quoting."""
    if not is_key(text):
        raise StoreError(
            f"object key {text[:80]!r} must be {RULE}, at most {MAX_KEY} characters in all"
        )


def check_range(key: str, tag: Tag, start: int, stop: int) -> None:
    """StoreError unless a range lies inside the object that `tag` pins."""
    if not 0 <= start <= stop <= tag.nbytes:
        raise StoreError(
            f"bytes {start} to {stop} were asked of object {key!r}, which has {tag.nbytes}; "
            f"a range must lie inside the object"
        )


def confirmed(where: str, tag: Tag | None, *, nbytes: int) -> Tag:
    """What was found after a write; StoreError when it is not there or of another size."""
    if tag is None or tag.nbytes != nbytes:
        found = "no object" if tag is None else f"{tag.nbytes} bytes"
        raise StoreError(
            f"{where} was written with {nbytes} bytes, but {found} found afterwards; "
            f"see who else writes there, check the server and publish it again"
        )
    return tag


def missing(where: str) -> ObjectMissing:
    """The error for an object that is gone."""
    return ObjectMissing(f"{where} is not there; it was removed or never published")


def changed(where: str) -> ObjectChanged:
    """The error for an object that is no longer the one that was looked up."""
    return ObjectChanged(f"{where} was replaced since it was looked up; look it up again")


def late(where: str) -> StoreLate:
    """The error for a call that the deadline ended."""
    return StoreLate(f"{where} was not answered in full by the deadline; the request was cancelled")
