"""What the S3 bucket makes of servers that lie, stall, redirect and refuse.

Each server here stands where the run's own would: everything a peer's bucket could ever do wrong is
an answer of one of them.
"""

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from atoll.blobs import s3_signing
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import PIECE_BYTES, Tag
from atoll.blobs.objects import ObjectStore
from atoll.blobs.s3_bucket import S3Bucket
from atoll.clock import SystemClock
from atoll.errors import (
    AtollError,
    ObjectChanged,
    ObjectMissing,
    ObjectRefused,
    ObjectSize,
    StoreAway,
    StoreError,
    StoreLate,
)
from tests import hostile_s3
from tests.hostile_s3 import Answer, Asked, HostileServer

CLOCK = SystemClock()
SIZE = 3 * PIECE_BYTES // 2
WHOLE = bytes(i * 11 % 253 for i in range(SIZE))
TAG = Tag(SIZE, '"one"', None)
ETAG = 'etag: "one"'
FLOOD_BYTES = 64 << 20
SHORT = 0.4  # seconds until the deadline of what never ends


@contextmanager
def bucket_of(answer: Answer, *, timeout: float = 20.0) -> Iterator[tuple[S3Bucket, HostileServer]]:
    with hostile_s3.serving(answer) as server:
        access = S3Access(
            access_key_id="known",
            secret_access_key="secret",
            session_token="token-of-the-session",
            endpoint=server.url,
            timeout_seconds=timeout,
        )
        with S3Bucket("pond", access, CLOCK) as bucket:
            yield bucket, server


def soon(seconds: float = 20.0) -> float:
    return CLOCK.now() + seconds


def taken(
    bucket: S3Bucket, start: int = 0, stop: int = SIZE, *, seconds: float = 20.0
) -> tuple[bytes, AtollError | None]:
    """What arrived, and the error that followed."""
    got = bytearray()
    try:
        for piece in bucket.pieces("a", TAG, start, stop, deadline=soon(seconds)):
            got += piece
    except AtollError as exc:
        return bytes(got), exc
    return bytes(got), None


def range_head(start: int, stop: int, total: int = SIZE) -> str:
    return f"content-range: bytes {start}-{stop - 1}/{total}"


def partial(asked: Asked, start: int, stop: int, *headers: str, body: bytes) -> None:
    asked.answer("206 Partial Content", ETAG, range_head(start, stop), *headers, body=body)


def test_honest_answer_is_taken_and_was_asked_for_by_range_and_tag() -> None:
    """The control of all that follows."""

    def honest(asked: Asked) -> None:
        partial(asked, 5, SIZE, f"content-length: {SIZE - 5}", body=WHOLE[5:])

    with bucket_of(honest) as (bucket, server):
        found = taken(bucket, 5)

    assert found == (WHOLE[5:], None)
    [asked] = server.asked
    assert (asked.method, asked.path) == ("GET", "/pond/a")
    assert asked.headers["range"] == f"bytes=5-{SIZE - 1}"
    assert asked.headers["if-match"] == '"one"'


def test_answer_without_a_length_is_taken_when_it_ends_in_time() -> None:
    def unmeasured(asked: Asked) -> None:
        partial(asked, 0, SIZE, "connection: close", body=WHOLE)

    with bucket_of(unmeasured) as (bucket, _):
        assert taken(bucket) == (WHOLE, None)


def test_more_bytes_than_asked_for_are_cut_and_the_connection_closed() -> None:
    closed = threading.Event()

    def flood(asked: Asked) -> None:
        asked.answer("206 Partial Content", ETAG, range_head(0, SIZE), "connection: close")
        asked.connection.sendall(WHOLE)
        try:
            while True:
                asked.connection.sendall(bytes(1 << 16))
        except ConnectionError:
            closed.set()
            raise

    with bucket_of(flood) as (bucket, _):
        data, error = taken(bucket)
        assert closed.wait(20)

    assert data == WHOLE
    assert isinstance(error, ObjectSize)


def test_flood_does_not_fill_the_memory() -> None:
    """Measured 2 to 4 MB, most of it asyncio's; whoever read on would hold all of the flood."""
    block = bytes(1 << 20)  # made before the measuring: the server is in this process

    def flood(asked: Asked) -> None:
        asked.answer("206 Partial Content", ETAG, range_head(0, SIZE), "connection: close")
        for _ in range(FLOOD_BYTES // len(block)):
            asked.connection.sendall(block)

    with bucket_of(flood) as (bucket, _):
        taken(bucket)  # what is made once is not counted
        tracemalloc.start()
        errors = [taken(bucket)[1] for _ in range(3)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert [type(error) for error in errors] == [ObjectSize] * 3
    assert peak < FLOOD_BYTES // 8


def test_length_that_is_another_is_refused_before_a_byte_is_read() -> None:
    def longer(asked: Asked) -> None:
        partial(asked, 0, SIZE, f"content-length: {SIZE + 1}", body=WHOLE + b"!")

    with bucket_of(longer) as (bucket, _):
        data, error = taken(bucket)

    assert data == b""
    assert isinstance(error, ObjectSize)


def test_fewer_bytes_with_an_honest_length_are_refused() -> None:
    def fewer(asked: Asked) -> None:
        partial(asked, 0, SIZE, "content-length: 100", body=WHOLE[:100])

    with bucket_of(fewer) as (bucket, _):
        data, error = taken(bucket)

    assert data == b""
    assert isinstance(error, ObjectSize)


def test_fewer_bytes_without_a_length_are_refused_after_what_came() -> None:
    def fewer(asked: Asked) -> None:
        partial(asked, 0, SIZE, "connection: close", body=WHOLE[:100])

    with bucket_of(fewer) as (bucket, _):
        data, error = taken(bucket)

    assert data == WHOLE[:100]
    assert isinstance(error, ObjectSize)


def test_connection_that_breaks_gives_what_came_and_can_be_resumed_behind_it() -> None:
    """Also a content-length that lies: more is promised than ever comes."""

    def breaks_once(asked: Asked) -> None:
        start = int(asked.headers["range"].removeprefix("bytes=").partition("-")[0])
        rest = WHOLE[start:]
        body = rest[: PIECE_BYTES + 100] if start == 0 else rest
        partial(asked, start, SIZE, f"content-length: {len(rest)}", body=body)

    with bucket_of(breaks_once) as (bucket, server):
        data, error = taken(bucket)
        rest = taken(bucket, len(data))

    assert data == WHOLE[: PIECE_BYTES + 100]
    assert isinstance(error, StoreAway)
    assert rest == (WHOLE[PIECE_BYTES + 100 :], None)
    assert len(server.asked) == 2


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_redirect_is_refused_and_nothing_is_sent_there(status: str) -> None:
    def elsewhere(asked: Asked) -> None:
        raise AssertionError(f"asked by {asked.headers}")

    with hostile_s3.serving(elsewhere) as other:

        def redirect(asked: Asked) -> None:
            target = f"location: {other.url}/pond/a"
            asked.answer(status, target, "content-length: 0", "connection: close")

        with bucket_of(redirect) as (bucket, server):
            with pytest.raises(ObjectRefused, match="redirected"):
                bucket.look("a", deadline=soon())
            assert isinstance(taken(bucket)[1], ObjectRefused)
            with pytest.raises(ObjectRefused, match="redirected"):
                bucket.put("a", WHOLE)
            with pytest.raises(ObjectRefused, match="redirected"):
                bucket.create("a", WHOLE)
            with pytest.raises(ObjectRefused, match="redirected"):
                bucket.remove("a")
            with pytest.raises(ObjectRefused, match="redirected"):
                list(bucket.keys("a"))

        assert other.asked == []
    # The control: the token was there to be carried on.
    assert {asked.headers["x-amz-security-token"] for asked in server.asked} == {
        "token-of-the-session"
    }
    assert len(server.asked) == 6


def _trickle(asked: Asked, ended: threading.Event) -> None:
    """A byte of body now and then, until the client hangs up."""
    while not asked.is_closed():
        asked.connection.sendall(b"x")
    ended.set()


def test_trickle_is_cancelled_at_the_deadline_and_its_socket_closed() -> None:
    ended = threading.Event()

    def slow(asked: Asked) -> None:
        partial(asked, 0, SIZE, f"content-length: {SIZE}", body=WHOLE[:10])
        _trickle(asked, ended)

    with bucket_of(slow) as (bucket, _):
        began = CLOCK.now()
        data, error = taken(bucket, seconds=SHORT)
        took = CLOCK.now() - began
        assert ended.wait(20)  # while the bucket is still open

    assert isinstance(error, StoreLate)
    assert SHORT <= took < SHORT + 2
    assert data[:10] == WHOLE[:10]  # what came before is not lost
    assert set(data[10:]) == {ord("x")}


def test_trickle_of_header_lines_is_cancelled_too() -> None:
    ended = threading.Event()

    def slow(asked: Asked) -> None:
        asked.connection.sendall(b"HTTP/1.1 200 OK\r\nx-never: ")
        _trickle(asked, ended)

    with bucket_of(slow) as (bucket, _):
        with pytest.raises(StoreLate):
            bucket.look("a", deadline=soon(SHORT))
        assert ended.wait(20)


def test_trickle_in_the_answer_to_a_write_ends_at_the_timeout() -> None:
    ended = threading.Event()

    def slow(asked: Asked) -> None:
        asked.connection.sendall(b"HTTP/1.1 200 OK\r\nx-never: ")
        _trickle(asked, ended)

    with bucket_of(slow, timeout=SHORT) as (bucket, _):
        with pytest.raises(StoreLate):
            bucket.put("a", b"few")
        assert ended.wait(20)


def test_trickle_does_not_hold_up_another_object() -> None:
    ended, begun = threading.Event(), threading.Event()

    def one_is_slow(asked: Asked) -> None:
        if asked.path == "/pond/slow":
            partial(asked, 0, SIZE, f"content-length: {SIZE}", body=b"")
            begun.set()
            _trickle(asked, ended)
        else:
            partial(asked, 0, SIZE, f"content-length: {SIZE}", body=WHOLE)

    with bucket_of(one_is_slow) as (bucket, _):
        slow = bucket.pieces("slow", TAG, 0, SIZE, deadline=soon(2.0))
        waiting = threading.Thread(target=lambda: _drained(slow))
        waiting.start()
        assert begun.wait(20)
        assert taken(bucket) == (WHOLE, None)
        assert not ended.is_set()
        waiting.join()
        assert ended.wait(20)


def _drained(pieces: Iterator[memoryview]) -> None:
    with pytest.raises(StoreLate):
        for _ in pieces:
            pass


def test_reader_that_gives_up_closes_its_connection() -> None:
    ended = threading.Event()

    def endless(asked: Asked) -> None:
        partial(asked, 0, SIZE, f"content-length: {SIZE}", body=WHOLE[:PIECE_BYTES])
        if asked.wait_for_end():
            ended.set()

    with bucket_of(endless) as (bucket, _):
        reading = bucket.pieces("a", TAG, 0, SIZE, deadline=soon())
        next(reading)
        reading.close()  # type: ignore[attr-defined] # a generator
        assert ended.wait(20)


def test_bucket_that_is_closed_ends_whoever_waits_for_it() -> None:
    ended, begun = threading.Event(), threading.Event()
    met: list[StoreError] = []

    def endless(asked: Asked) -> None:
        partial(asked, 0, SIZE, f"content-length: {SIZE}", body=b"")
        begun.set()
        if asked.wait_for_end():
            ended.set()

    def wait(bucket: S3Bucket) -> None:
        with pytest.raises(StoreError) as raised:
            list(bucket.pieces("a", TAG, 0, SIZE, deadline=soon()))
        met.append(raised.value)

    with bucket_of(endless) as (bucket, _):
        waiting = threading.Thread(target=wait, args=(bucket,))
        waiting.start()
        assert begun.wait(20)
        bucket.close()
        waiting.join(20)
        assert not waiting.is_alive()
        assert ended.wait(20)

    assert len(met) == 1


def test_bucket_that_is_closed_refuses_calls_and_lets_a_reader_go() -> None:
    def half(asked: Asked) -> None:
        partial(asked, 0, SIZE, f"content-length: {SIZE}", body=WHOLE[:PIECE_BYTES])
        asked.wait_for_end()

    with bucket_of(half) as (bucket, _):
        reading = bucket.pieces("a", TAG, 0, SIZE, deadline=soon())
        next(reading)
        bucket.close()
        bucket.close()

        with pytest.raises(StoreError, match="is closed"):
            bucket.look("a", deadline=soon())
        reading.close()  # type: ignore[attr-defined] # a generator


@pytest.mark.parametrize("status", ["503 Slow Down", "429 Too Many", "500 Oops", "409 Conflict"])
def test_overload_is_a_server_that_is_away(status: str) -> None:
    def busy(asked: Asked) -> None:
        asked.answer(status, "content-length: 0", "connection: close")

    with bucket_of(busy) as (bucket, server):
        with pytest.raises(StoreAway, match=status[:3]):
            bucket.look("a", deadline=soon())
        assert isinstance(taken(bucket)[1], StoreAway)
        with pytest.raises(StoreAway, match=status[:3]):
            bucket.put("a", WHOLE)
        with pytest.raises(StoreAway, match=status[:3]):
            bucket.create("a", WHOLE)

    assert len(server.asked) == 4  # whoever asked decides when to ask again


def test_server_that_does_not_listen_is_away() -> None:
    with bucket_of(lambda _: None) as (bucket, server):
        server.close()
        with pytest.raises(StoreAway):
            bucket.look("a", deadline=soon())


@pytest.mark.parametrize("status", ["403 Forbidden", "400 Bad", "501 Not Implemented"])
def test_refusal_is_not_to_be_asked_again(status: str) -> None:
    def refuse(asked: Asked) -> None:
        asked.answer(status, "content-length: 0", "connection: close")

    with bucket_of(refuse) as (bucket, _), pytest.raises(ObjectRefused, match=status[:3]) as raised:
        bucket.create("a", WHOLE)

    assert not raised.value.retry


CHANGED = {
    "the server says so": ("412 Precondition Failed", ETAG, "content-length: 0"),
    "it has become shorter": ("416 Range Not Satisfiable", ETAG, "content-length: 0"),
    "if-match is ignored": ("206 Partial", 'etag: "two"', range_head(0, SIZE)),
    "no tag is told": ("206 Partial", "x-none: 1", range_head(0, SIZE)),
}


@pytest.mark.parametrize("why", CHANGED)
def test_object_that_changed_since_the_look_is_refused(why: str) -> None:
    status, *headers = CHANGED[why]

    with bucket_of(lambda asked: asked.answer(status, *headers, "connection: close")) as (
        bucket,
        _,
    ):
        data, error = taken(bucket)

    assert data == b""
    assert isinstance(error, ObjectChanged)


def test_object_that_is_gone_since_the_look_is_missing() -> None:
    def gone(asked: Asked) -> None:
        asked.answer("404 Not Found", "content-length: 0", "connection: close")

    with bucket_of(gone) as (bucket, _):
        assert isinstance(taken(bucket)[1], ObjectMissing)


@pytest.mark.parametrize(
    "head",
    [range_head(0, SIZE - 1), range_head(1, SIZE), range_head(0, SIZE, SIZE + 1), "x-none: 1"],
)
def test_other_range_than_asked_for_is_refused(head: str) -> None:
    def other(asked: Asked) -> None:
        asked.answer("206 Partial", ETAG, head, f"content-length: {SIZE}", body=WHOLE)

    with bucket_of(other) as (bucket, _):
        data, error = taken(bucket)

    assert data == b""
    assert isinstance(error, ObjectSize)


def test_whole_object_in_place_of_a_range_is_refused_unread() -> None:
    def whole(asked: Asked) -> None:
        asked.answer("200 OK", ETAG, f"content-length: {SIZE}", body=WHOLE)

    with bucket_of(whole) as (bucket, _):
        assert taken(bucket) == (WHOLE, None)  # the control: all of it was asked for
        data, error = taken(bucket, 1)

    assert data == b""
    assert isinstance(error, ObjectSize)


@pytest.mark.parametrize(
    "headers",
    [
        ("content-length: 5",),
        (ETAG, "content-length: five"),
        (ETAG, "content-length: 99999999999999999999"),
        ("etag: " + "e" * 500, "content-length: 5"),
        ('etag: "\u00e9"', "content-length: 5"),  # cannot be sent back as it came
        ('etag: "\u3042"', "content-length: 5"),
    ],
)
def test_look_without_size_or_tag_is_a_typed_error(headers: tuple[str, ...]) -> None:
    with (
        bucket_of(lambda asked: asked.answer("200 OK", *headers)) as (bucket, _),
        pytest.raises(StoreError),
    ):
        bucket.look("a", deadline=soon())


@pytest.mark.parametrize("told", ["nonsense", "Mon, 99 Foo 2026 00:00:00 GMT", ""])
def test_look_with_an_unreadable_time_knows_none(told: str) -> None:
    def dated(asked: Asked) -> None:
        asked.answer("200 OK", ETAG, "content-length: 5", f"last-modified: {told}")

    with bucket_of(dated) as (bucket, _):
        assert bucket.look("a", deadline=soon()) == Tag(5, '"one"', None)


def test_header_without_end_is_cut_off() -> None:
    def huge(asked: Asked) -> None:
        asked.connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            asked.connection.sendall(b"x-a: " + b"a" * 65_000 + b"\r\n")

    with bucket_of(huge) as (bucket, _), pytest.raises(StoreAway):
        bucket.look("a", deadline=soon())


def test_put_that_the_server_lost_is_not_believed() -> None:
    def forgets(asked: Asked) -> None:
        status = "200 OK" if asked.method == "PUT" else "404 Not Found"
        asked.answer(status, ETAG, "content-length: 0", "connection: close")

    with bucket_of(forgets) as (bucket, server):
        with pytest.raises(StoreError, match="no object found afterwards"):
            bucket.put("a", WHOLE)
        with pytest.raises(StoreError, match="no object found afterwards"):
            bucket.create("a", WHOLE)

    assert [asked.method for asked in server.asked] == ["PUT", "HEAD"] * 2


def test_put_that_came_out_shorter_is_not_believed() -> None:
    def cuts(asked: Asked) -> None:
        length = 0 if asked.method == "PUT" else SIZE - 1
        asked.answer("200 OK", ETAG, f"content-length: {length}", "connection: close")

    with bucket_of(cuts) as (bucket, _), pytest.raises(StoreError, match=f"{SIZE - 1} bytes found"):
        bucket.put("a", WHOLE)


def test_put_that_another_replaced_at_once_is_not_taken_for_ours() -> None:
    def replaced(asked: Asked) -> None:
        length, etag = (0, '"ours"') if asked.method == "PUT" else (SIZE, '"theirs"')
        asked.answer("200 OK", f"etag: {etag}", f"content-length: {length}", "connection: close")

    with bucket_of(replaced) as (bucket, _), pytest.raises(ObjectChanged):
        bucket.put("a", WHOLE)


def test_create_is_conditional_and_tells_who_was_first() -> None:
    def taken_already(asked: Asked) -> None:
        asked.answer("412 Precondition Failed", "content-length: 0", "connection: close")

    with bucket_of(taken_already) as (bucket, server):
        assert bucket.create("a", WHOLE) is False

    assert [asked.headers["if-none-match"] for asked in server.asked] == ["*"]


def listing(asked: Asked, inner: str) -> None:
    body = f'<ListBucketResult xmlns="http://s3">{inner}</ListBucketResult>'.encode()
    asked.answer("200 OK", f"content-length: {len(body)}", "connection: close", body=body)


def contents(*keys: str) -> str:
    return "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)


def test_listing_goes_on_page_by_page() -> None:
    def pages(asked: Asked) -> None:
        if "continuation-token=a%2Fb" in asked.path:
            listing(asked, contents("p/3") + "<IsTruncated>false</IsTruncated>")
        else:
            more = "<IsTruncated>true</IsTruncated>"
            token = "<NextContinuationToken>a/b</NextContinuationToken>"
            listing(asked, contents("p/1", "p/2") + more + token)

    with bucket_of(pages) as (bucket, server):
        assert list(bucket.keys("p")) == ["p/1", "p/2", "p/3"]

    assert len(server.asked) == 2


def test_listing_of_what_was_not_asked_for_is_left_out() -> None:
    foreign = contents("p/1", "q/1", "p/../q", "/etc/passwd", "p/é")

    with bucket_of(lambda asked: listing(asked, foreign)) as (bucket, _):
        assert list(bucket.keys("p")) == ["p/1"]


@pytest.mark.parametrize(
    "body",
    [b"no xml", b"", b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'],
    ids=["text", "none", "entity"],
)
def test_listing_that_is_none_is_refused(body: bytes) -> None:
    def answer(asked: Asked) -> None:
        asked.answer("200 OK", f"content-length: {len(body)}", "connection: close", body=body)

    with bucket_of(answer) as (bucket, _), pytest.raises(ObjectRefused, match="no listing"):
        list(bucket.keys("p"))


def test_listing_without_end_is_cut_off() -> None:
    def endless(asked: Asked) -> None:
        asked.answer("200 OK", "connection: close")
        while True:
            asked.connection.sendall(b"<a>" * 20_000)

    with bucket_of(endless) as (bucket, _), pytest.raises(ObjectSize):
        list(bucket.keys("p"))


def test_listing_of_endless_pages_ends_at_the_timeout() -> None:
    def endless(asked: Asked) -> None:
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
        listing(asked, contents("p/1") + more)

    with bucket_of(endless, timeout=SHORT) as (bucket, _), pytest.raises(StoreLate):
        for _ in bucket.keys("p"):
            pass


def test_signature_is_that_of_the_published_example() -> None:
    """AWS documentation, "Signature calculations: examples", GET bucket lifecycle."""
    access = S3Access(
        access_key_id="AKIAIOSFODNN7EXAMPLE",
        secret_access_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    )

    headers = s3_signing.headers(
        "GET",
        "https://examplebucket.s3.amazonaws.com/?lifecycle=",
        access=access,
        wall=1369353600.0,  # 20130524T000000Z
    )

    assert headers["authorization"].endswith(
        "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    )


def test_blob_store_does_not_take_a_short_piece_for_a_damaged_blob() -> None:
    def short(asked: Asked) -> None:
        asked.answer(
            "206 Partial",
            ETAG,
            "last-modified: Tue, 17 Nov 2026 22:00:00 GMT",
            "content-range: bytes 0-99/100",
            "content-length: 50",
            "connection: close",
            body=bytes(50),
        )

    with hostile_s3.serving(short) as server:
        access = S3Access(access_key_id="a", secret_access_key="b", endpoint=server.url, retries=0)
        with pytest.raises(ObjectSize, match="100 bytes from 0 and gave 50"):
            list(ObjectStore("pond", access).pieces("a", nbytes=100))
