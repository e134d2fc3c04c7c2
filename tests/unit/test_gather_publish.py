"""Publishing: the frame first, the statement last, and what a crash at any call leaves."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.blobs.bucket import PIECE_BYTES, Bucket, Tag
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import ManualClock
from atoll.errors import ConfigError, Conflict, FrameError, StoreAway, StoreError
from atoll.gather import publish as publishing
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.publish import Published, frame_key, publish, remove_old, statement_key
from atoll.gather.statement import Statement

KEY = SecretKey(bytes(32))
HOME = "peers/a"
LATER = 1e9
KEEP = 2


def frame_of(window: int) -> bytes:
    """More than one piece, another one for each window."""
    return b"%08d" % window * (PIECE_BYTES // 8 + 5)


def statement_of(frame: bytes, window: int) -> Statement:
    return Statement(
        run_id="run",
        manifest_sha256="a" * 64,
        uid="a",
        window=window,
        base_digest="b" * 64,
        sample_digest="c" * 64,
        nbytes=len(frame),
        sha256=hashlib.sha256(frame).hexdigest(),
    )


def published(bucket: Bucket, window: int, *, keep: int = KEEP) -> Published:
    frame = frame_of(window)
    return publish(bucket, HOME, frame, statement_of(frame, window), KEY, keep=keep, deadline=LATER)


def content(bucket: Bucket, key: str) -> bytes | None:
    tag = bucket.look(key, deadline=LATER)
    if tag is None:
        return None
    return b"".join(map(bytes, bucket.pieces(key, tag, 0, tag.nbytes, deadline=LATER)))


def check_every_statement_has_its_frame(bucket: Bucket) -> int:
    """How many statements there are, each with the whole frame that it names."""
    keys = list(bucket.keys(f"{HOME}/statements"))
    for key in keys:
        stated = statements.read(content(bucket, key) or b"", KEY.public)
        frame = content(bucket, frame_key(HOME, stated.sha256))
        assert frame is not None and len(frame) == stated.nbytes
        assert hashlib.sha256(frame).hexdigest() == stated.sha256
    return len(keys)


class Recorded(MemoryBucket):
    """A bucket that notes what is changed, and after so many calls is gone for good."""

    def __init__(self, *, calls: int | None = None) -> None:
        super().__init__(ManualClock())
        self.calls = calls
        self.changes: list[tuple[str, str]] = []
        self.after = False  # whether the last call is made before its answer is lost

    def _count(self, is_before: bool) -> None:
        if self.calls is None:
            return
        if is_before is self.after:
            return
        self.calls -= 1
        if self.calls < 0:
            raise StoreAway("the server is away; wait for it")

    def look(self, key: str, *, deadline: float) -> Tag | None:
        self._count(True)
        found = super().look(key, deadline=deadline)
        self._count(False)
        return found

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        self._count(True)
        yield from super().pieces(key, tag, start, stop, deadline=deadline)
        self._count(False)

    def put(self, key: str, source: bytes | Path) -> Tag:
        self._count(True)
        tag = super().put(key, source)
        self.changes.append(("put", key))
        self._count(False)
        return tag

    def create(self, key: str, data: bytes) -> bool:
        self._count(True)
        made = super().create(key, data)
        self.changes.append(("create", key))
        self._count(False)
        return made

    def remove(self, key: str) -> None:
        self._count(True)
        super().remove(key)
        self.changes.append(("remove", key))
        self._count(False)

    def keys(self, prefix: str) -> Iterator[str]:
        self._count(True)
        found = list(super().keys(prefix))
        self._count(False)
        return iter(found)


def test_keys_are_those_of_the_format() -> None:
    assert frame_key("p/q", "f" * 64) == "p/q/frames/" + "f" * 64
    assert statement_key("p/q", 7) == "p/q/statements/00000007.json"
    assert statement_key("p/q", 123456789) == "p/q/statements/123456789.json"


def test_frame_is_put_before_its_statement() -> None:
    bucket = Recorded()
    frame = frame_of(3)
    named = statement_of(frame, 3)

    published(bucket, 3)

    assert bucket.changes == [
        ("put", frame_key(HOME, named.sha256)),
        ("create", statement_key(HOME, 3)),
    ]
    assert content(bucket, statement_key(HOME, 3)) == statements.signed(named, KEY)
    assert content(bucket, frame_key(HOME, named.sha256)) == frame


def test_file_is_published_as_its_bytes(tmp_path: Path) -> None:
    bucket = Recorded()
    path = tmp_path / "frame"
    path.write_bytes(frame_of(3))

    publish(bucket, HOME, path, statement_of(frame_of(3), 3), KEY, keep=KEEP, deadline=LATER)

    assert check_every_statement_has_its_frame(bucket) == 1


CALLS = 21  # at least as many as publishing a window with two older ones to remove needs


@pytest.mark.parametrize("after", [False, True], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("calls", range(CALLS))
def test_crash_at_any_call_leaves_no_statement_without_its_frame(calls: int, after: bool) -> None:
    bucket = Recorded()
    for window in (1, 2):
        published(bucket, window, keep=9)
    bucket.after, bucket.calls = after, calls

    with contextlib.suppress(StoreAway):  # the last of the sweep come to their end
        published(bucket, 3, keep=1)

    bucket.calls = None
    check_every_statement_has_its_frame(bucket)
    published(bucket, 3, keep=1)
    assert check_every_statement_has_its_frame(bucket) == 1
    assert len(list(bucket.keys(HOME))) == 2  # and nothing of the older windows is left


def test_sweep_of_crashes_goes_beyond_the_last_call() -> None:
    bucket = Recorded()
    for window in (1, 2):
        published(bucket, window, keep=9)
    bucket.calls = CALLS

    published(bucket, 3, keep=1)

    assert 0 < bucket.calls < CALLS


def test_publishing_the_same_again_changes_nothing() -> None:
    bucket = Recorded()
    first = published(bucket, 3)
    bucket.changes.clear()

    again = published(bucket, 3)

    assert (again.frame, again.statement) == (first.frame, first.statement)
    assert [change for change in bucket.changes if change[0] != "create"] == []


def test_other_statement_of_a_window_is_a_conflict_and_the_first_stands() -> None:
    bucket = Recorded()
    published(bucket, 3)
    before = content(bucket, statement_key(HOME, 3))
    other = frame_of(99)

    with pytest.raises(Conflict, match="another statement of window 3"):
        publish(bucket, HOME, other, statement_of(other, 3), KEY, keep=KEEP, deadline=LATER)

    assert content(bucket, statement_key(HOME, 3)) == before
    assert check_every_statement_has_its_frame(bucket) == 1


@pytest.mark.parametrize("changed", [{"nbytes": 5}, {"sha256": "e" * 64}], ids=["size", "sha256"])
def test_statement_of_other_bytes_is_refused_before_anything_is_written(changed) -> None:
    bucket = Recorded()
    named = replace(statement_of(frame_of(3), 3), **changed)

    with pytest.raises(FrameError, match="state what is published"):
        publish(bucket, HOME, frame_of(3), named, KEY, keep=KEEP, deadline=LATER)

    assert (bucket.changes, list(bucket.keys(HOME))) == ([], [])


@pytest.mark.parametrize("cut", [0, 1], ids=["other bytes", "shorter"])
def test_frame_that_is_damaged_in_the_bucket_is_replaced(cut: int) -> None:
    bucket = Recorded()
    frame = frame_of(3)
    key = frame_key(HOME, statement_of(frame, 3).sha256)
    bucket.put(key, bytes(len(frame) - cut))

    published(bucket, 3)

    assert check_every_statement_has_its_frame(bucket) == 1


class Losing(MemoryBucket):
    """A bucket that stores one byte less than it was given."""

    def put(self, key: str, source: bytes | Path) -> Tag:
        assert isinstance(source, bytes)
        return super().put(key, source[:-1])


def test_frame_that_is_not_confirmed_gets_no_statement() -> None:
    bucket = Losing(ManualClock())

    with pytest.raises(StoreError, match="publish it again"):
        published(bucket, 3)

    assert list(bucket.keys(f"{HOME}/statements")) == []


class Silent(MemoryBucket):
    """A bucket that says it created what it did not keep."""

    def create(self, key: str, data: bytes) -> bool:
        return True


def test_statement_that_is_not_confirmed_is_an_error() -> None:
    with pytest.raises(StoreError, match="is gone"):
        published(Silent(ManualClock()), 3)


def windows_of(bucket: Bucket) -> list[int]:
    return sorted(int(key[-13:-5]) for key in bucket.keys(f"{HOME}/statements"))


def test_windows_older_than_keep_are_removed_as_new_ones_come() -> None:
    bucket = Recorded()

    for window in range(5):
        published(bucket, window, keep=2)

    assert windows_of(bucket) == [3, 4]
    assert sorted(bucket.keys(f"{HOME}/frames")) == sorted(
        frame_key(HOME, statement_of(frame_of(window), window).sha256) for window in (3, 4)
    )


def test_statements_are_removed_before_their_frames() -> None:
    bucket = Recorded()
    for window in range(3):
        published(bucket, window, keep=9)
    bucket.changes.clear()

    removed = remove_old(bucket, HOME, 2, 1, deadline=LATER)

    assert [key for _, key in bucket.changes] == list(removed)
    assert ["statements" in key for key in removed] == [True, True, False, False]


def test_frame_that_a_kept_window_names_too_stays() -> None:
    bucket = Recorded()
    frame = frame_of(1)
    for window in (1, 2):
        publish(bucket, HOME, frame, statement_of(frame, window), KEY, keep=9, deadline=LATER)

    remove_old(bucket, HOME, 2, 1, deadline=LATER)

    assert windows_of(bucket) == [2]
    assert check_every_statement_has_its_frame(bucket) == 1


def test_frame_that_a_crash_left_without_a_statement_is_removed() -> None:
    bucket = Recorded()
    bucket.put(frame_key(HOME, "e" * 64), b"left behind")

    published(bucket, 3)

    assert bucket.look(frame_key(HOME, "e" * 64), deadline=LATER) is None


def test_windows_to_come_and_foreign_objects_stay() -> None:
    bucket = Recorded()
    published(bucket, 9)
    foreign = [f"{HOME}/notes", f"{HOME}/frames/readme", f"{HOME}/statements/1.json",
               "peers/ab/statements/00000001.json"]  # fmt: skip
    for key in foreign:
        bucket.put(key, b"not ours")

    remove_old(bucket, HOME, 3, 1, deadline=LATER)

    assert content(bucket, statement_key(HOME, 9)) is not None
    assert [content(bucket, key) for key in foreign] == [b"not ours"] * 4


def test_kept_statement_that_cannot_be_read_keeps_every_frame() -> None:
    bucket = Recorded()
    for window in (1, 2):
        published(bucket, window, keep=9)
    bucket.put(statement_key(HOME, 2), b"damaged")

    with pytest.raises(StoreError, match=r"00000002\.json"):
        remove_old(bucket, HOME, 2, 1, deadline=LATER)

    assert len(list(bucket.keys(f"{HOME}/frames"))) == 2


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_of_nothing_is_refused_before_anything_is_written(keep: int) -> None:
    bucket = Recorded()

    with pytest.raises(ConfigError, match=f"keep={keep}"):
        published(bucket, 3, keep=keep)
    with pytest.raises(ConfigError, match=f"keep={keep}"):
        publishing.remove_old(bucket, HOME, 3, keep, deadline=LATER)

    assert bucket.changes == []
