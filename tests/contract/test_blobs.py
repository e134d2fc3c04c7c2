"""One suite for every blob store: memory, directory and S3 keep the same promises.

At the end, what only S3 and the choice of a store by its location add.
"""

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import S3Store

from atoll.blobs.access import S3Access
from atoll.blobs.base import BlobRef, Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.blobs.memory import MemoryBlobs
from atoll.blobs.registry import open_blobs
from atoll.blobs.s3 import S3Blobs
from atoll.errors import BlobChanged, BlobMissing, ConfigError, StoreAway, StoreError
from atoll.launch import seaweed
from tests import servers

ABSENT = "0" * 64
TEXT = b"an atoll is a ring of islands"
_PREFIXES = itertools.count()


@dataclass(frozen=True)
class Subject:
    """A store and what a test may do behind its back."""

    blobs: Blobs
    corrupt: Callable[[str, bytes], None]
    leftovers: Callable[[], list[str]]  # drafts on the local disk
    reopen: Callable[[], Blobs]  # the same place in a later life


@pytest.fixture(params=["memory", "directory", pytest.param("s3", marks=pytest.mark.s3)])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    if request.param == "memory":
        made = memory_subject()
    elif request.param == "directory":
        made = directory_subject(tmp_path / "blobs")
    else:
        made = s3_subject(request.getfixturevalue("s3_server").url, tmp_path / "spool")
    yield made
    made.blobs.close()


@pytest.fixture
def blobs(subject: Subject) -> Blobs:
    return subject.blobs


class CorruptibleBlobs(MemoryBlobs):
    """Blobs in memory of which a bit can flip, as on a disk."""

    def corrupt(self, sha256: str, data: bytes) -> None:
        self._stored[sha256] = data


def memory_subject() -> Subject:
    blobs = CorruptibleBlobs()
    # Memory has no later life: a simulated coordinator that restarts is handed the same store.
    return Subject(blobs, blobs.corrupt, list, lambda: blobs)


def directory_subject(root: Path) -> Subject:
    def corrupt(sha256: str, data: bytes) -> None:
        overwrite(root / sha256[:2] / sha256, data)

    return Subject(
        DirectoryBlobs(root),
        corrupt,
        lambda: os.listdir(root / "tmp"),
        lambda: DirectoryBlobs(root),
    )


def s3_subject(url: str, spool: Path) -> Subject:
    prefix = f"contract-{os.getpid()}-{next(_PREFIXES)}"

    def opened() -> S3Blobs:
        return S3Blobs(servers.BUCKET, prefix, access=access(url), spool=spool)

    store = S3Store(
        servers.BUCKET,
        config={
            "endpoint": url,
            "region": "us-east-1",
            "access_key_id": servers.ACCESS_KEY_ID,
            "secret_access_key": servers.SECRET_ACCESS_KEY,
        },
        client_options={"allow_http": True},
    )

    def corrupt(sha256: str, data: bytes) -> None:
        obstore.put(store, f"{prefix}/{sha256[:2]}/{sha256}", data)

    return Subject(opened(), corrupt, lambda: os.listdir(spool / "tmp"), opened)


def access(url: str, *, secret: str = servers.SECRET_ACCESS_KEY) -> S3Access:
    return S3Access(access_key_id=servers.ACCESS_KEY_ID, secret_access_key=secret, endpoint=url)


def overwrite(path: Path, data: bytes) -> None:
    """Writes in place until the kernel's clock, which ticks every few ms, shows the change."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.write_bytes(data)


def put(blobs: Blobs, *chunks: bytes) -> BlobRef:
    writer = blobs.writer()
    for chunk in chunks:
        writer.write(chunk)
    return writer.commit()


def get(blobs: Blobs, sha256: str) -> bytes:
    with blobs.open(sha256) as reader:
        return reader.read(0, reader.nbytes)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_blob_is_named_by_its_sha256_and_size(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    assert ref == BlobRef(sha256_of(TEXT), len(TEXT))


def test_blob_round_trips(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    assert get(blobs, ref.sha256) == TEXT


def test_empty_blob_round_trips(blobs: Blobs) -> None:
    ref = put(blobs)

    assert (ref, get(blobs, ref.sha256)) == (BlobRef(sha256_of(b""), 0), b"")


def test_blob_of_many_chunks_round_trips(blobs: Blobs) -> None:
    # 20 MiB + 1: more than two upload parts and download pieces of S3.
    chunks = [bytes([i]) * (1 << 20) for i in range(20)] + [b"!"]

    ref = put(blobs, *chunks)

    assert get(blobs, ref.sha256) == b"".join(chunks)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chunks=st.lists(st.binary(max_size=300), max_size=8))
def test_blob_does_not_depend_on_chunking(blobs: Blobs, chunks: list[bytes]) -> None:
    whole = b"".join(chunks)

    ref = put(blobs, *chunks)

    assert (ref.sha256, get(blobs, ref.sha256)) == (sha256_of(whole), whole)


def test_writer_takes_any_bytes_like_object(blobs: Blobs) -> None:
    writer = blobs.writer()

    writer.write(bytearray(TEXT[:4]))
    writer.write(memoryview(TEXT)[4:])

    assert get(blobs, writer.commit().sha256) == TEXT


def test_writer_does_not_alias_its_callers_buffer(blobs: Blobs) -> None:
    buffer = bytearray(TEXT)
    writer = blobs.writer()
    writer.write(buffer)

    buffer[:] = bytes(len(TEXT))

    assert get(blobs, writer.commit().sha256) == TEXT


def test_writer_counts_and_hashes_what_it_took(blobs: Blobs) -> None:
    writer = blobs.writer()

    writer.write(TEXT)

    assert (writer.nbytes, writer.digest()) == (len(TEXT), sha256_of(TEXT))


def test_writer_may_move_between_threads(blobs: Blobs) -> None:
    writer = blobs.writer()
    for chunk in (TEXT[:7], TEXT[7:]):
        thread = threading.Thread(target=writer.write, args=(chunk,))
        thread.start()
        thread.join()

    ref = writer.commit()

    assert get(blobs, ref.sha256) == TEXT


@pytest.mark.parametrize("expect_bytes", [0, len(TEXT), 3, 1 << 20])
def test_expected_size_does_not_change_the_blob(blobs: Blobs, expect_bytes: int) -> None:
    writer = blobs.writer(expect_bytes=expect_bytes)
    writer.write(TEXT)

    ref = writer.commit()

    assert (ref.nbytes, get(blobs, ref.sha256)) == (len(TEXT), TEXT)


def test_blob_is_not_visible_before_commit(blobs: Blobs) -> None:
    writer = blobs.writer()

    writer.write(TEXT)

    assert list(blobs.stored()) == []
    with pytest.raises(BlobMissing):
        blobs.open(sha256_of(TEXT))


def test_commit_of_equal_content_keeps_one_blob(blobs: Blobs) -> None:
    first = put(blobs, TEXT)

    second = put(blobs, TEXT)

    assert (second, list(blobs.stored())) == (first, [first])


def test_commit_of_equal_content_leaves_no_draft(subject: Subject) -> None:
    put(subject.blobs, TEXT)

    put(subject.blobs, TEXT)

    assert subject.leftovers() == []


def test_commit_repeated_returns_the_same_blob(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.write(TEXT)

    first = writer.commit()

    assert writer.commit() == first


def test_commit_replaces_a_changed_blob_of_its_name(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    subject.corrupt(ref.sha256, flipped(TEXT))

    put(subject.blobs, TEXT)

    assert get(subject.blobs, ref.sha256) == TEXT


def test_write_after_commit_is_refused(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.commit()

    with pytest.raises(StoreError, match="has ended"):
        writer.write(TEXT)


def test_commit_after_abort_is_refused(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.abort()

    with pytest.raises(StoreError, match="has ended"):
        writer.commit()


def test_abort_leaves_nothing(subject: Subject) -> None:
    writer = subject.blobs.writer(expect_bytes=1 << 20)
    writer.write(TEXT)

    writer.abort()

    assert (subject.leftovers(), list(subject.blobs.stored())) == ([], [])


def test_abort_may_be_repeated(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.abort()

    writer.abort()

    assert list(blobs.stored()) == []


def test_abort_after_commit_keeps_the_blob(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.write(TEXT)
    ref = writer.commit()

    writer.abort()

    assert get(blobs, ref.sha256) == TEXT


def test_reader_returns_exactly_the_range(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    with blobs.open(ref.sha256) as reader:
        piece = reader.read(3, 5)

    assert piece == TEXT[3:8]


def test_reader_fills_a_buffer_from_an_offset(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)
    buffer = bytearray(5)

    with blobs.open(ref.sha256) as reader:
        reader.read_into(3, memoryview(buffer))

    assert buffer == TEXT[3:8]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, len(TEXT) + 1), (len(TEXT), 1), (-1, 1)])
def test_read_outside_the_blob_is_refused(blobs: Blobs, offset: int, nbytes: int) -> None:
    ref = put(blobs, TEXT)

    with blobs.open(ref.sha256) as reader, pytest.raises(StoreError, match="inside the blob"):
        reader.read(offset, nbytes)


def test_read_into_a_buffer_longer_than_the_blob_is_refused(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)
    buffer = memoryview(bytearray(len(TEXT) + 1))

    with blobs.open(ref.sha256) as reader, pytest.raises(StoreError, match="inside the blob"):
        reader.read_into(0, buffer)


def test_read_after_close_is_refused(blobs: Blobs) -> None:
    reader = blobs.open(put(blobs, TEXT).sha256)
    reader.close()

    with pytest.raises(StoreError, match="closed"):
        reader.read(0, 1)


def test_reader_is_shared_between_threads(blobs: Blobs) -> None:
    data = bytes(range(256)) * 1024
    offsets = range(0, len(data), 4096)
    ref = put(blobs, data)

    with blobs.open(ref.sha256) as reader, ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda offset: reader.read(offset, 4096), offsets))

    assert b"".join(pieces) == data


def test_several_threads_open_one_blob(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: get(blobs, ref.sha256), range(16)))

    assert copies == [TEXT] * 16


def test_open_reader_survives_a_delete(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    with blobs.open(ref.sha256) as reader:
        blobs.delete(ref.sha256)
        data = reader.read(0, reader.nbytes)

    assert data == TEXT


def test_stored_lists_every_blob_with_its_size(blobs: Blobs) -> None:
    refs = {put(blobs, bytes(n)) for n in range(5)}

    assert set(blobs.stored()) == refs


def test_delete_removes_only_the_named_blob(blobs: Blobs) -> None:
    kept, gone = put(blobs, TEXT), put(blobs, b"gone")

    blobs.delete(gone.sha256)

    assert list(blobs.stored()) == [kept]
    with pytest.raises(BlobMissing):
        blobs.open(gone.sha256)


def test_delete_of_an_absent_blob_is_harmless(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)

    blobs.delete(ABSENT)

    assert list(blobs.stored()) == [ref]


def test_open_of_an_absent_blob_names_it(blobs: Blobs) -> None:
    with pytest.raises(BlobMissing, match=ABSENT):
        blobs.open(ABSENT)


def test_open_of_a_deleted_blob_names_it(blobs: Blobs) -> None:
    ref = put(blobs, TEXT)
    get(blobs, ref.sha256)

    blobs.delete(ref.sha256)

    with pytest.raises(BlobMissing, match=ref.sha256):
        blobs.open(ref.sha256)


@pytest.mark.parametrize(
    "change", [flipped, lambda data: data[:-1], lambda data: data + b"x", lambda _: b""]
)
def test_changed_blob_is_refused_with_both_hashes(
    subject: Subject, change: Callable[[bytes], bytes]
) -> None:
    ref = put(subject.blobs, TEXT)

    subject.corrupt(ref.sha256, change(TEXT))

    with pytest.raises(BlobChanged, match=rf"{ref.sha256}.*{sha256_of(change(TEXT))}"):
        subject.blobs.open(ref.sha256)


def test_blob_changed_after_a_read_is_refused(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    get(subject.blobs, ref.sha256)

    subject.corrupt(ref.sha256, flipped(TEXT))

    with pytest.raises(BlobChanged, match=ref.sha256):
        subject.blobs.open(ref.sha256)


def test_refused_blob_leaves_no_draft(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    subject.corrupt(ref.sha256, flipped(TEXT))

    with pytest.raises(BlobChanged):
        subject.blobs.open(ref.sha256)

    assert subject.leftovers() == []


def test_sweep_removes_the_drafts_of_an_earlier_life(subject: Subject) -> None:
    unfinished = subject.blobs.writer()
    unfinished.write(TEXT)

    subject.reopen().sweep()

    assert (unfinished.nbytes, subject.leftovers()) == (len(TEXT), [])


def test_sweep_keeps_stored_blobs(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    reopened = subject.reopen()

    reopened.sweep()

    assert get(reopened, ref.sha256) == TEXT


def test_sweep_keeps_the_drafts_of_this_life(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.write(TEXT[:5])

    blobs.sweep()

    writer.write(TEXT[5:])
    assert get(blobs, writer.commit().sha256) == TEXT


def test_close_drops_the_drafts_that_are_open(subject: Subject) -> None:
    writer = subject.blobs.writer()
    writer.write(TEXT)

    subject.blobs.close()

    assert (writer.nbytes, subject.leftovers()) == (len(TEXT), [])


def test_blob_is_there_after_a_restart(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    subject.blobs.close()

    reopened = subject.reopen()

    assert (list(reopened.stored()), get(reopened, ref.sha256)) == ([ref], TEXT)


def test_blob_changed_between_lives_is_refused(subject: Subject) -> None:
    ref = put(subject.blobs, TEXT)
    subject.corrupt(ref.sha256, flipped(TEXT))

    reopened = subject.reopen()

    with pytest.raises(BlobChanged, match=ref.sha256):
        reopened.open(ref.sha256)


@pytest.mark.parametrize("name", ["../" * 20 + "etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
@pytest.mark.parametrize("call", ["open", "delete"])
def test_name_that_is_no_sha256_is_refused(blobs: Blobs, name: str, call: str) -> None:
    with pytest.raises(StoreError, match="64 lower-case hex digits"):
        getattr(blobs, call)(name)


@pytest.fixture
def s3_url(s3_server: servers.RunningServer) -> str:
    return s3_server.url


def s3_blobs(url: str, spool: Path, **changes) -> S3Blobs:
    given = {"access": replace(access(url), retries=0), "spool": spool, **changes}
    return S3Blobs(servers.BUCKET, f"s3-only-{os.getpid()}-{next(_PREFIXES)}", **given)


def cached(spool: Path) -> list[str]:
    return os.listdir(spool / "cache")


@pytest.mark.s3
def test_s3_evicts_the_copy_used_longest_ago_when_over_its_budget(
    s3_url: str, tmp_path: Path
) -> None:
    blobs = s3_blobs(s3_url, tmp_path, cache_bytes=25)
    read, _idle = (put(blobs, bytes([i]) * 10) for i in range(2))
    get(blobs, read.sha256)

    new = put(blobs, bytes(9))

    assert set(cached(tmp_path)) == {read.sha256, new.sha256}


@pytest.mark.s3
def test_s3_serves_a_blob_larger_than_its_budget(s3_url: str, tmp_path: Path) -> None:
    blobs = s3_blobs(s3_url, tmp_path, cache_bytes=1)
    ref = put(blobs, TEXT)

    data = get(blobs, ref.sha256)

    assert (data, cached(tmp_path)) == (TEXT, [])


@pytest.mark.s3
def test_s3_removes_its_copies_on_close(s3_url: str, tmp_path: Path) -> None:
    blobs = s3_blobs(s3_url, tmp_path)
    put(blobs, TEXT)

    blobs.close()

    assert cached(tmp_path) == []


@pytest.mark.s3
def test_s3_sweep_removes_the_copies_of_an_earlier_life(s3_url: str, tmp_path: Path) -> None:
    put(s3_blobs(s3_url, tmp_path), TEXT)

    s3_blobs(s3_url, tmp_path).sweep()

    assert cached(tmp_path) == []


@pytest.mark.s3
def test_s3_downloads_again_when_its_local_copy_was_touched(s3_url: str, tmp_path: Path) -> None:
    blobs = s3_blobs(s3_url, tmp_path)
    ref = put(blobs, TEXT)

    overwrite(tmp_path / "cache" / ref.sha256, flipped(TEXT))

    assert get(blobs, ref.sha256) == TEXT


@pytest.mark.s3
def test_s3_ignores_aws_variables(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")

    ref = put(s3_blobs(s3_url, tmp_path), TEXT)

    assert ref.nbytes == len(TEXT)


@pytest.mark.s3
def test_s3_refuses_a_wrong_secret_naming_the_object(s3_url: str, tmp_path: Path) -> None:
    blobs = s3_blobs(s3_url, tmp_path, access=access(s3_url, secret="wrong"))

    with pytest.raises(StoreError, match=rf"cannot upload s3://{servers.BUCKET}/.*403"):
        put(blobs, TEXT)


@pytest.mark.s3
def test_s3_keeps_the_draft_of_a_refused_upload(s3_url: str, tmp_path: Path) -> None:
    blobs = s3_blobs(s3_url, tmp_path, access=access(s3_url, secret="wrong"))
    writer = blobs.writer()
    writer.write(TEXT)

    with pytest.raises(StoreError, match="cannot upload"):
        writer.commit()

    assert (len(os.listdir(tmp_path / "tmp")), writer.nbytes) == (1, len(TEXT))


def test_s3_server_that_does_not_answer_is_a_store_error(tmp_path: Path) -> None:
    [port] = seaweed.free_ports(1)
    blobs = s3_blobs(f"http://127.0.0.1:{port}", tmp_path)

    with pytest.raises(StoreAway, match="cannot look up") as caught:
        blobs.open(ABSENT)

    assert not isinstance(caught.value, BlobMissing)
    assert caught.value.retry  # an island that uploads meanwhile waits for it


def test_s3_secret_is_not_shown() -> None:
    shown = repr(access("http://127.0.0.1:9"))

    assert servers.SECRET_ACCESS_KEY not in shown


def test_location_memory_opens_a_memory_store(tmp_path: Path) -> None:
    assert isinstance(open_blobs("memory:", spool=tmp_path), MemoryBlobs)


def test_location_path_opens_a_directory_store(tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path / "blobs"), spool=tmp_path / "spool")

    ref = put(blobs, TEXT)

    assert (tmp_path / "blobs" / ref.sha256[:2] / ref.sha256).read_bytes() == TEXT


@pytest.mark.s3
def test_location_s3_stores_below_its_prefix(s3_url: str, tmp_path: Path) -> None:
    location = f"s3://{servers.BUCKET}/located-{os.getpid()}/runs/"
    ref = put(open_blobs(location, spool=tmp_path / "a", s3=access(s3_url)), TEXT)

    elsewhere = open_blobs(location + "other", spool=tmp_path / "b", s3=access(s3_url))
    again = open_blobs(location, spool=tmp_path / "c", s3=access(s3_url))

    assert (list(again.stored()), list(elsewhere.stored())) == ([ref], [])


@pytest.mark.parametrize("location", ["", "gs://bucket/prefix", "s3://ab/x"])
def test_location_of_no_known_store_is_refused_by_value(tmp_path: Path, location: str) -> None:
    with pytest.raises(ConfigError, match=f"blobs={location!r}"):
        open_blobs(location, spool=tmp_path, s3=access("http://127.0.0.1:9"))


def test_location_s3_without_credentials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs S3 credentials"):
        open_blobs("s3://bucket/prefix", spool=tmp_path)


def test_s3_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="must start with https://"):
        access("127.0.0.1:9000")
