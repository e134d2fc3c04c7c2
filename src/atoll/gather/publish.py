"""A peer's side of a window: the frame under its sha256, then, last, the statement that names it.

    <prefix>/frames/<sha256>
    <prefix>/statements/<window>.json      eight digits or more

Whoever reads a statement finds its frame, because the frame was confirmed before. A statement is
created and never replaced, so a peer cannot say two things of one window by accident. One process
publishes below a prefix at a time.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import bucket as buckets
from atoll.blobs.bucket import PIECE_BYTES, Bucket, Tag
from atoll.errors import ConfigError, Conflict, FrameError, ObjectMissing, StoreError
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement

_FRAMES, _STATEMENTS = "frames", "statements"
_STATEMENT_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,18})\.json\Z")
_FRAME_NAME = re.compile(r"[0-9a-f]{64}\Z")


def frame_key(prefix: str, sha256: str) -> str:
    """Where a frame is."""
    return f"{prefix}/{_FRAMES}/{sha256}"


def statement_key(prefix: str, window: int) -> str:
    """Where the statement of a window is."""
    return f"{prefix}/{_STATEMENTS}/{window:08d}.json"


@dataclass(frozen=True, slots=True)
class Published:
    """What is in the bucket now, and the keys that were removed as too old."""

    frame: Tag
    statement: Tag
    removed: tuple[str, ...]


def publish(
    bucket: Bucket,
    prefix: str,
    frame: Path | bytes,
    statement: Statement,
    key: SecretKey,
    *,
    keep: int,
    deadline: float,
) -> Published:
    """Publishes `frame` with its statement, then removes what is older than `keep` windows.

    Whatever is raised, there is no statement without its frame; publishing the same again is
    harmless and goes on where it ended. Conflict when another statement of that window stands.
    `deadline`, in the bucket's time, is for what is read; writes have their own limits.
    """
    check_keep(keep)
    placed, stated = place(bucket, prefix, frame, statement, key, deadline=deadline)
    removed = remove_old(bucket, prefix, statement.window, keep, deadline=deadline)
    return Published(placed, stated, removed)


def place(
    bucket: Bucket,
    prefix: str,
    frame: Path | bytes,
    statement: Statement,
    key: SecretKey,
    *,
    deadline: float,
) -> tuple[Tag, Tag]:
    """As `publish`, and leaves all that is older where it is; the tags of frame and statement."""
    _check_frame(frame, statement)
    placed = _place_frame(bucket, prefix, frame, statement, deadline=deadline)
    return placed, _place_statement(bucket, prefix, statement, key, deadline=deadline)


def stated(bucket: Bucket, prefix: str, window: int, *, deadline: float) -> Statement | None:
    """What a peer finds in its own bucket for a window; None where nothing is stated."""
    key = statement_key(prefix, window)
    if bucket.look(key, deadline=deadline) is None:
        return None
    return _own(bucket, key, deadline=deadline)


def remove_old(
    bucket: Bucket, prefix: str, window: int, keep: int, *, deadline: float
) -> tuple[str, ...]:
    """Removes what belongs to none of the last `keep` windows up to `window`; the removed keys.

    Statements go first, then the frames that no statement names that is left: nobody is ever
    pointed to a frame that is gone. Objects of other names are left alone.
    """
    check_keep(keep)
    windows = {
        key: int(match[1])
        for key in bucket.keys(f"{prefix}/{_STATEMENTS}")
        if (match := _STATEMENT_NAME.match(_name(key, f"{prefix}/{_STATEMENTS}")))
    }
    old = sorted(key for key, found in windows.items() if found <= window - keep)
    for key in old:
        bucket.remove(key)
    named = {
        _own(bucket, key, deadline=deadline).sha256 for key in sorted(windows.keys() - set(old))
    }
    frames = sorted(
        key
        for key in bucket.keys(f"{prefix}/{_FRAMES}")
        if _FRAME_NAME.match(name := _name(key, f"{prefix}/{_FRAMES}")) and name not in named
    )
    for key in frames:
        bucket.remove(key)
    return (*old, *frames)


def check_keep(keep: int) -> None:
    """ConfigError unless at least the present window is kept."""
    if keep < 1:
        raise ConfigError(
            f"keep={keep} must be 1 or more: the window that is being gathered has to stay"
        )


def _check_frame(frame: Path | bytes, statement: Statement) -> None:
    """FrameError unless the statement is of these bytes."""
    digest, nbytes = hashlib.sha256(), 0
    if isinstance(frame, bytes):
        digest.update(frame)
        nbytes = len(frame)
    else:
        with filesystem.naming("read", frame), frame.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                nbytes += len(piece)
    if (digest.hexdigest(), nbytes) != (statement.sha256, statement.nbytes):
        raise FrameError(
            f"the frame has {nbytes} bytes with the sha256 {digest.hexdigest()}, its statement "
            f"says {statement.nbytes} bytes and {statement.sha256}; state what is published"
        )


def _place_frame(
    bucket: Bucket, prefix: str, frame: Path | bytes, statement: Statement, *, deadline: float
) -> Tag:
    key = frame_key(prefix, statement.sha256)
    found = bucket.look(key, deadline=deadline)
    # Left as it is where it is right: writing it again would move its time, by which a copy is
    # told from its original, and could break off a reader.
    if (
        found is not None
        and found.nbytes == statement.nbytes
        and _sha256(bucket, key, found, deadline=deadline) == statement.sha256
    ):
        return found
    placed = bucket.put(key, frame)
    return buckets.confirmed(f"object {key!r}", placed, nbytes=statement.nbytes)


def _place_statement(
    bucket: Bucket, prefix: str, statement: Statement, key: SecretKey, *, deadline: float
) -> Tag:
    where = statement_key(prefix, statement.window)
    document = statements.signed(statement, key)
    bucket.create(where, document)
    # Read back whether it was created or not: an earlier life may have done it, with these bytes.
    tag, found = _read(bucket, where, deadline=deadline)
    if found != document:
        raise Conflict(
            f"{where!r} holds another statement of window {statement.window}; a window is stated "
            f"once, so publish what it names, or wait for the next window"
        )
    return tag


def _own(bucket: Bucket, key: str, *, deadline: float) -> Statement:
    try:
        return statements.unverified(_read(bucket, key, deadline=deadline)[1])
    except FrameError as exc:
        raise StoreError(
            f"{key!r} is no statement ({exc}), so it is not known which frames are in use and none "
            f"was removed; see who wrote it, then remove it"
        ) from exc


def _read(bucket: Bucket, key: str, *, deadline: float) -> tuple[Tag, bytes]:
    """A statement's tag and bytes; of one that is too long only as much as shows it."""
    tag = bucket.look(key, deadline=deadline)
    if tag is None:
        raise ObjectMissing(f"object {key!r} was written and is gone; see who else writes there")
    stop = min(tag.nbytes, statements.MAX_BYTES + 1)
    pieces = bucket.pieces(key, tag, 0, stop, deadline=deadline)
    return tag, b"".join(bytes(piece) for piece in pieces)


def _sha256(bucket: Bucket, key: str, tag: Tag, *, deadline: float) -> str:
    digest = hashlib.sha256()
    for piece in bucket.pieces(key, tag, 0, tag.nbytes, deadline=deadline):
        digest.update(piece)
    return digest.hexdigest()


def _name(key: str, folder: str) -> str:
    return key.removeprefix(folder + "/")
