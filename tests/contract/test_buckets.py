"""One suite for every bucket: memory, directory and S3 keep the same promises."""

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.blobs import buckets as opening
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import PIECE_BYTES, Bucket, Tag
from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.blobs.s3_bucket import S3Bucket
from atoll.clock import SystemClock
from atoll.errors import (
    ConfigError,
    ObjectChanged,
    ObjectMissing,
    ObjectRefused,
    StoreError,
    StoreLate,
)
from tests import servers

CLOCK = SystemClock()
TEXT = b"an atoll is a ring of islands"
# More than two pieces and a rest, of bytes that tell their place.
LARGE = bytes(i * 7 % 251 for i in range(2 * PIECE_BYTES + 12_345))
_PREFIXES = itertools.count()


def soon() -> float:
    return CLOCK.now() + 30


def access(url: str) -> S3Access:
    return S3Access(
        access_key_id=servers.ACCESS_KEY_ID,
        secret_access_key=servers.SECRET_ACCESS_KEY,
        endpoint=url,
    )


@pytest.fixture(params=["memory", "directory", pytest.param("s3", marks=pytest.mark.s3)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    if request.param == "memory":
        yield MemoryBucket(CLOCK)
    elif request.param == "directory":
        yield DirectoryBucket(tmp_path / "bucket", CLOCK)
    else:
        url = request.getfixturevalue("s3_server").url
        with S3Bucket(servers.BUCKET, access(url), CLOCK) as opened:
            yield opened


@pytest.fixture
def home() -> str:
    """A folder of the bucket that no other test uses."""
    return f"buckets-{os.getpid()}-{next(_PREFIXES)}"


def tag_of(bucket: Bucket, key: str) -> Tag:
    tag = bucket.look(key, deadline=soon())
    assert tag is not None
    return tag


def read(bucket: Bucket, key: str, tag: Tag, start: int = 0, stop: int | None = None) -> bytes:
    stop = tag.nbytes if stop is None else stop
    return b"".join(map(bytes, bucket.pieces(key, tag, start, stop, deadline=soon())))


def test_object_round_trips_with_its_tag(bucket: Bucket, home: str) -> None:
    before = CLOCK.wall()

    tag = bucket.put(f"{home}/a", TEXT)

    assert tag == tag_of(bucket, f"{home}/a")
    assert (tag.nbytes, read(bucket, f"{home}/a", tag)) == (len(TEXT), TEXT)
    assert tag.modified is not None
    assert -2 < tag.modified - before < 30  # S3 tells whole seconds


def test_empty_object_round_trips(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/empty", b"")

    assert (tag.nbytes, read(bucket, f"{home}/empty", tag)) == (0, b"")


def test_file_is_stored_as_its_bytes(bucket: Bucket, home: str, tmp_path: Path) -> None:
    source = tmp_path / "frame"
    source.write_bytes(LARGE)

    tag = bucket.put(f"{home}/file", source)

    assert read(bucket, f"{home}/file", tag) == LARGE


def test_pieces_are_bounded_and_in_order(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/large", LARGE)

    pieces = [bytes(p) for p in bucket.pieces(f"{home}/large", tag, 0, len(LARGE), deadline=soon())]

    assert b"".join(pieces) == LARGE
    assert len(pieces) == 3
    assert max(map(len, pieces)) == PIECE_BYTES


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 1),
        (1, PIECE_BYTES),
        (PIECE_BYTES - 1, 2 * PIECE_BYTES + 1),
        (len(LARGE) - 1, len(LARGE)),
    ],
)
def test_range_is_exactly_what_was_asked_for(
    bucket: Bucket, home: str, start: int, stop: int
) -> None:
    tag = bucket.put(f"{home}/large", LARGE)

    assert read(bucket, f"{home}/large", tag, start, stop) == LARGE[start:stop]


def test_range_of_nothing_gives_no_piece(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/a", TEXT)

    assert read(bucket, f"{home}/a", tag, 5, 5) == b""


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, len(TEXT) + 1)])
def test_range_outside_the_object_is_refused(
    bucket: Bucket, home: str, start: int, stop: int
) -> None:
    tag = bucket.put(f"{home}/a", TEXT)

    with pytest.raises(StoreError, match="must lie inside the object"):
        read(bucket, f"{home}/a", tag, start, stop)


def test_look_at_nothing_gives_none(bucket: Bucket, home: str) -> None:
    assert bucket.look(f"{home}/absent", deadline=soon()) is None


def test_look_below_an_object_gives_none(bucket: Bucket, home: str) -> None:
    bucket.put(f"{home}/a", TEXT)

    assert bucket.look(f"{home}/a/b", deadline=soon()) is None


def test_removed_object_is_missing_to_a_reader(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/a", TEXT)
    bucket.remove(f"{home}/a")

    with pytest.raises(ObjectMissing, match=f"{home}/a"):
        read(bucket, f"{home}/a", tag)


def test_replaced_object_is_changed_to_a_reader_of_the_old_one(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/a", TEXT)
    other = bucket.put(f"{home}/a", TEXT[::-1])

    with pytest.raises(ObjectChanged, match=f"{home}/a"):
        read(bucket, f"{home}/a", tag, 3)
    assert read(bucket, f"{home}/a", other) == TEXT[::-1]


def test_replaced_object_never_mixes_with_the_old_one(bucket: Bucket, home: str) -> None:
    """Between two ranges: what follows is refused, whatever was read before."""
    tag = bucket.put(f"{home}/large", LARGE)
    first = read(bucket, f"{home}/large", tag, 0, PIECE_BYTES)
    bucket.put(f"{home}/large", LARGE[::-1])

    with pytest.raises(ObjectChanged):
        read(bucket, f"{home}/large", tag, PIECE_BYTES)
    assert first == LARGE[:PIECE_BYTES]


def test_replaced_object_has_another_entity(bucket: Bucket, home: str) -> None:
    first = bucket.put(f"{home}/a", TEXT)

    assert bucket.put(f"{home}/a", TEXT[::-1]).entity != first.entity


def test_reader_that_stops_early_leaves_the_bucket_usable(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/large", LARGE)
    reading = bucket.pieces(f"{home}/large", tag, 0, len(LARGE), deadline=soon())

    first = bytes(next(reading))
    reading.close()  # type: ignore[attr-defined] # each bucket's is a generator

    assert first == LARGE[:PIECE_BYTES]
    assert read(bucket, f"{home}/large", tag) == LARGE


def test_deadline_that_is_over_ends_a_look(bucket: Bucket, home: str) -> None:
    bucket.put(f"{home}/a", TEXT)

    with pytest.raises(StoreLate, match="deadline"):
        bucket.look(f"{home}/a", deadline=CLOCK.now() - 1)


def test_deadline_that_is_over_ends_a_read(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/a", TEXT)

    with pytest.raises(StoreLate, match="deadline"):
        list(bucket.pieces(f"{home}/a", tag, 0, len(TEXT), deadline=CLOCK.now() - 1))


def test_create_makes_an_object_once(bucket: Bucket, home: str) -> None:
    made = bucket.create(f"{home}/a", TEXT), bucket.create(f"{home}/a", b"another")

    assert made == (True, False)
    assert read(bucket, f"{home}/a", tag_of(bucket, f"{home}/a")) == TEXT


def test_create_does_not_touch_what_put_left(bucket: Bucket, home: str) -> None:
    tag = bucket.put(f"{home}/a", TEXT)

    assert bucket.create(f"{home}/a", TEXT) is False
    assert tag_of(bucket, f"{home}/a") == tag


def test_create_of_many_at_once_has_one_winner(bucket: Bucket, home: str) -> None:
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        return bucket.create(f"{home}/one", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))

    assert won.count(True) == 1
    found = read(bucket, f"{home}/one", tag_of(bucket, f"{home}/one"))
    assert found == b"%d" % won.index(True)


def test_create_works_again_after_a_removal(bucket: Bucket, home: str) -> None:
    bucket.create(f"{home}/a", TEXT)
    bucket.remove(f"{home}/a")

    assert bucket.create(f"{home}/a", b"another") is True


def test_remove_is_harmless_when_repeated(bucket: Bucket, home: str) -> None:
    bucket.put(f"{home}/a", TEXT)

    bucket.remove(f"{home}/a")
    bucket.remove(f"{home}/a")

    assert bucket.look(f"{home}/a", deadline=soon()) is None


def test_keys_are_those_below_the_folder_alone(bucket: Bucket, home: str) -> None:
    inside = {f"{home}/x/1", f"{home}/x/2", f"{home}/x/deep/3"}
    for key in {*inside, f"{home}/xy/4", f"{home}/5"}:
        bucket.put(key, TEXT)

    assert sorted(bucket.keys(f"{home}/x")) == sorted(inside)


def test_keys_of_an_empty_folder_are_none(bucket: Bucket, home: str) -> None:
    assert list(bucket.keys(home)) == []


def test_refused_writes_leave_nothing_to_list(bucket: Bucket, home: str) -> None:
    bucket.create(f"{home}/a", TEXT)
    bucket.create(f"{home}/a", b"another")

    assert list(bucket.keys(home)) == [f"{home}/a"]


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", "..", "a/../b", ".drafts/1", "-a", "a b", "a?b", "a%2e", "é",
     "a\n", "a" * 1025],
)  # fmt: skip
def test_key_that_could_lead_elsewhere_is_refused_by_every_call(bucket: Bucket, key: str) -> None:
    tag = Tag(1, "entity")
    calls = [
        lambda: bucket.look(key, deadline=soon()),
        lambda: list(bucket.pieces(key, tag, 0, 1, deadline=soon())),
        lambda: bucket.put(key, TEXT),
        lambda: bucket.create(key, TEXT),
        lambda: bucket.remove(key),
        lambda: list(bucket.keys(key)),
    ]

    for call in calls:
        with pytest.raises(StoreError, match="object key"):
            call()


def test_many_threads_share_one_bucket(bucket: Bucket, home: str) -> None:
    def turn(number: int) -> bytes:
        data = bytes([number]) * (PIECE_BYTES + number)
        tag = bucket.put(f"{home}/{number}", data)
        return read(bucket, f"{home}/{number}", tag)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(turn, range(8)))

    assert found == [bytes([n]) * (PIECE_BYTES + n) for n in range(8)]


def test_file_that_is_not_there_is_named_and_nothing_is_stored(
    bucket: Bucket, home: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="no-such-file"):
        bucket.put(f"{home}/a", tmp_path / "no-such-file")

    assert bucket.look(f"{home}/a", deadline=soon()) is None


# What a directory adds


def test_directory_keeps_objects_for_a_later_life(tmp_path: Path) -> None:
    tag = DirectoryBucket(tmp_path, CLOCK).put("a/b", TEXT)

    again = DirectoryBucket(tmp_path, CLOCK)

    assert read(again, "a/b", tag) == TEXT


def test_directory_notices_a_file_that_is_written_to_while_it_is_read(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path, CLOCK)
    tag = bucket.put("a", LARGE)
    reading = bucket.pieces("a", tag, 0, len(LARGE), deadline=soon())
    next(reading)

    os.truncate(tmp_path / "a", PIECE_BYTES + 1)

    with pytest.raises(ObjectChanged):
        next(reading)


def test_directory_leaves_no_draft_behind(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path, CLOCK)

    bucket.put("a", TEXT)
    bucket.create("a", TEXT)
    bucket.create("b", TEXT)

    assert os.listdir(tmp_path / ".drafts") == []


def test_directory_lists_no_file_that_is_no_object(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path, CLOCK)
    bucket.put("a/b", TEXT)
    (tmp_path / "a" / ".hidden").write_bytes(TEXT)
    (tmp_path / "a" / "two words").write_bytes(TEXT)

    assert list(bucket.keys("a")) == ["a/b"]


def test_directory_does_not_follow_a_link_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(TEXT)
    bucket = DirectoryBucket(tmp_path / "bucket", CLOCK)
    (tmp_path / "bucket" / "a").symlink_to(tmp_path / "secret")

    with pytest.raises(StoreError):
        bucket.look("a", deadline=soon())


@pytest.mark.parametrize("kind", ["pipe", "link", "loop"])
def test_directory_refuses_what_is_no_plain_file_at_once(tmp_path: Path, kind: str) -> None:
    """A peer may write below its own folder: a pipe there must not hold a reader up for ever."""
    bucket = DirectoryBucket(tmp_path / "bucket", CLOCK)
    bucket.put("a/b", TEXT)
    path = tmp_path / "bucket" / "a" / "b"
    tag = tag_of(bucket, "a/b")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "bucket" / "a" / "c")

    with pytest.raises(ObjectRefused, match="plain file"):
        bucket.look("a/b", deadline=soon())
    with pytest.raises(ObjectRefused, match="plain file"):
        read(bucket, "a/b", tag)


def test_directory_has_no_object_where_a_folder_is(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket", CLOCK)
    bucket.put("a/b", TEXT)

    assert bucket.look("a", deadline=soon()) is None
    with pytest.raises(ObjectMissing):
        read(bucket, "a", Tag(3, "x"))


# The choice of a bucket by its location


def test_location_opens_the_bucket_it_names(tmp_path: Path) -> None:
    with opening.opened(str(tmp_path / "b"), clock=CLOCK) as bucket:
        bucket.put("a", TEXT)

    assert (tmp_path / "b" / "a").read_bytes() == TEXT


@pytest.mark.parametrize("location", ["", "gs://bucket", "s3://ab", "s3://bucket/prefix"])
def test_location_of_no_known_bucket_is_refused_by_value(location: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"bucket={location!r}"),
        opening.opened(location, clock=CLOCK, s3=access("http://127.0.0.1:9")),
    ):
        pass


def test_location_s3_without_credentials_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="needs S3 credentials"),
        opening.opened("s3://bucket", clock=CLOCK),
    ):
        pass
