"""Bodies of messages: each route has its limit, lists are bounded before they are looked at."""

import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import pytest
from pydantic import Field, TypeAdapter, ValidationError

from atoll.coordinator import handlers
from atoll.coordinator.planes import bodies
from atoll.coordinator.planes.access import Role
from atoll.errors import FrameTooLarge, ProtocolError
from atoll.protocol.exchange import Ask
from atoll.protocol.gather import MAX_PREAMBLE, MAX_STATEMENT, AnnounceRequest
from atoll.protocol.messages import (
    MAX_UNDER_WAY,
    AssignmentRequest,
    ErrorReply,
    HeartbeatRequest,
    Identity,
    Telemetry,
)
from atoll.protocol.samples import MAX_BATCH, Sample, SamplesRequest
from atoll.protocol.sharded import (
    MAX_LATE,
    MAX_RANKS,
    GroupRequest,
    HeldSave,
    MissingReport,
    PartReport,
)
from tests import served
from tests.served import SOCKET_SECONDS, TOKENS, Served, Worker

BIG = 2**53
LONG = -1.2345678901234567e-300  # as many letters as a number has
HASH = "f" * 64
WHO = Identity(
    run_id="r" * 64,
    manifest_sha256=HASH,
    worker_id="w" * 64,
    incarnation=BIG,
    island_key=HASH,
    generation=BIG,
)
NAMES = tuple(f"{n:064d}" for n in range(MAX_RANKS))
SENDING = [kind for kind in handlers.HANDLERS if kind.route.method != "GET"]
LIST_ITEMS = 340_000


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(
        tmp_path_factory.mktemp("bodies") / "state", membership={"min_workers": 3}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def alice(coordinator: Served) -> Worker:
    return coordinator.worker("alice")


def spelled(route: Any) -> str:
    """A path of the route, with a value for every name in it."""
    return str(route.path.format(**dict.fromkeys(route.names, "1")))


def said(coordinator: Served, head: str, body: bytes = b"") -> tuple[int, ErrorReply]:
    """What a request is refused with, by a server that then closes the connection."""
    token = f"Host: x\r\nAuthorization: Bearer {TOKENS[Role.ADMIN]}"
    where = ("127.0.0.1", coordinator.address.port)
    with socket.create_connection(where, timeout=SOCKET_SECONDS) as connection:
        connection.sendall(f"{head.replace('TOKEN', token)}\r\n\r\n".encode() + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), ErrorReply.model_validate_json(rest)


def listed(alice: Worker, items: int, item: object = None) -> bytes:
    """A batch of samples that says nothing, over and over."""
    body = {"identity": alice.identity().model_dump(), "life": 1, "samples": []}
    what = json.dumps({} if item is None else item)
    return json.dumps(body).replace("[]", f"[{','.join([what] * items)}]").encode()


# A limit for each route


@pytest.mark.parametrize("kind", SENDING, ids=lambda kind: kind.__name__)
def test_body_above_the_limit_of_its_route_is_refused_before_any_of_it_is_sent(
    coordinator: Served, kind: type[Ask[Any]]
) -> None:
    route = kind.route
    size = route.max_body_bytes + 1

    status, reply = said(
        coordinator, f"{route.method} {spelled(route)} HTTP/1.1\r\nTOKEN\r\nContent-Length: {size}"
    )

    assert (status, reply.code, reply.retry) == (413, FrameTooLarge.code, False)
    assert all(word in reply.message for word in (str(size), str(route.max_body_bytes)))
    assert route.method in reply.message
    assert route.path in reply.message or spelled(route) in reply.message


@pytest.mark.parametrize("kind", SENDING, ids=lambda kind: kind.__name__)
def test_chunked_body_is_refused_before_any_of_it_is_sent(
    coordinator: Served, kind: type[Ask[Any]]
) -> None:
    route = kind.route

    status, reply = said(
        coordinator,
        f"{route.method} {spelled(route)} HTTP/1.1\r\nTOKEN\r\nTransfer-Encoding: chunked",
    )

    assert (status, reply.code) == (413, FrameTooLarge.code)
    assert spelled(route) in reply.message


def test_message_in_the_address_takes_no_body(coordinator: Served) -> None:
    status, reply = said(coordinator, "GET /status HTTP/1.1\r\nTOKEN\r\nContent-Length: 1")

    assert (status, reply.code) == (413, FrameTooLarge.code)


def longest(statement: str) -> list[Ask[Any]]:
    """For each message with a list, the longest that its schema takes."""
    sample = Sample(
        sequence=BIG,
        wall=-LONG,
        round=BIG,
        step=BIG,
        loss=LONG,
        tokens_per_second=-LONG,
        memory_bytes=BIG,
        sent_per_second=-LONG,
        received_per_second=-LONG,
    )
    told = {
        name: BIG if info.annotation is int else -LONG for name, info in _fields(Telemetry).items()
    }
    save = HeldSave(step=BIG, group=BIG, rank=MAX_RANKS - 1, own=HASH, predecessor=HASH)
    return [
        SamplesRequest(identity=WHO, life=BIG, samples=(sample,) * MAX_BATCH),
        HeartbeatRequest(identity=WHO, telemetry=Telemetry.model_validate(told), acknowledged=BIG),
        AssignmentRequest(
            identity=WHO,
            version=BIG,
            digest=HASH,
            upcoming=BIG,
            awaits=BIG,
            under_way=(BIG,) * MAX_UNDER_WAY,
            wait_seconds=59.123456789012345,
        ),
        AnnounceRequest(
            identity=WHO,
            preamble="A" * (MAX_PREAMBLE // 4 * 4),
            sha256=HASH,
            nbytes=BIG,
            statement=statement * MAX_STATEMENT,
        ),
        GroupRequest(identity=WHO, group=BIG, held=(save,) * 8, pings=dict.fromkeys(NAMES, -LONG)),
        MissingReport(identity=WHO, group=BIG, step=BIG, missing=NAMES),
        PartReport(
            identity=WHO,
            group=BIG,
            round=BIG,
            step=BIG,
            part=HASH,
            blob=HASH,
            loss_sum=LONG,
            tokens=BIG,
            late=((BIG, MAX_RANKS - 1, MAX_RANKS),) * MAX_LATE,
        ),
    ]


def _fields(model: type[Telemetry]) -> dict[str, Any]:
    return dict(model.model_fields)


def test_longest_message_of_every_kind_is_within_the_limit_of_its_route() -> None:
    too_long = {
        type(message).__name__: len(message.model_dump_json())
        for message in longest('"')
        if len(message.model_dump_json()) > message.route.max_body_bytes
    }

    assert too_long == {}


# Lists


def test_list_that_is_too_long_is_one_error_and_none_of_its_items_is_looked_at(
    alice: Worker,
) -> None:
    with pytest.raises(ProtocolError, match=r"body\.samples: has 257 items and takes at most 256"):
        bodies.parse(SamplesRequest, listed(alice, MAX_BATCH + 1))


def test_list_of_bad_items_is_refused_by_its_first_one(alice: Worker) -> None:
    with pytest.raises(ProtocolError, match=r"body\.samples\.0\.sequence") as refused:
        bodies.parse(SamplesRequest, listed(alice, MAX_BATCH))

    assert isinstance(refused.value.__cause__, ValidationError)
    assert {error["loc"][1] for error in refused.value.__cause__.errors()} == {0}


def test_list_without_the_bound_makes_an_error_for_every_item() -> None:
    """The control: what pydantic does with a `max_length` alone."""
    plain: TypeAdapter[Any] = TypeAdapter(
        Annotated[tuple[Sample, ...], Field(max_length=MAX_BATCH)]
    )

    with pytest.raises(ValidationError) as refused:
        plain.validate_python([{}] * 1000)

    assert refused.value.error_count() >= 1000


def test_object_with_very_many_fields_is_refused_as_one(alice: Worker) -> None:
    body = json.dumps({f"k{n}": 1 for n in range(bodies.MAX_KEYS + 1)}).encode()

    with pytest.raises(ProtocolError, match="1101 fields and may have 1100"):
        bodies.parse(SamplesRequest, body)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constant_that_is_no_number_of_json_is_refused_wherever_it_stands(
    alice: Worker, constant: str
) -> None:
    body = listed(alice, 1, {"unknown": [1]}).replace(b"[1]", f"[{constant}]".encode())

    with pytest.raises(ProtocolError, match=f"{constant} is no number; numbers are finite"):
        bodies.parse(SamplesRequest, body)


# Against the server


def test_list_of_a_megabyte_is_refused_unread(coordinator: Served, alice: Worker) -> None:
    body = listed(alice, LIST_ITEMS)
    head = f"POST /workers/zzz/samples HTTP/1.1\r\nTOKEN\r\nContent-Length: {len(body)}"

    status, reply = said(coordinator, head)

    assert len(body) > 1_000_000
    assert (status, reply.code) == (413, FrameTooLarge.code)


def test_longest_list_that_is_read_takes_little_memory(coordinator: Served, alice: Worker) -> None:
    limit = SamplesRequest.route.max_body_bytes
    room = limit - len(listed(alice, 0))
    body = listed(alice, room // 3)
    assert limit - 10 < len(body) <= limit
    headers = {"authorization": f"Bearer {TOKENS[Role.WORKER]}"}
    tracemalloc.start()
    try:
        with httpx.Client(base_url=coordinator.url, headers=headers, trust_env=False) as client:
            replies = [client.post("/workers/alice/samples", content=body) for _ in range(5)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert {reply.status_code for reply in replies} == {422}
    assert "items and takes at most 256" in replies[0].json()["message"]
    assert peak < 16 << 20  # 32,000 empty tables are 3 MB; an error for each field was 500 MB


def test_heartbeats_are_answered_while_bodies_are_parsed(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_go_on, begun = bodies.parse, threading.Event(), threading.Semaphore(0)
    under_way, most, lock = [0], [0], threading.Lock()

    def slow(kind: type[Ask[Any]], body: bytes) -> Ask[Any]:
        if kind is SamplesRequest:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            begun.release()
            assert may_go_on.wait(SOCKET_SECONDS)
            with lock:
                under_way[0] -= 1
        return real(kind, body)

    monkeypatch.setattr(bodies, "parse", slow)
    body, count = listed(alice, 2000), 6
    headers = {"authorization": f"Bearer {TOKENS[Role.WORKER]}"}

    def post() -> int:
        url = f"{coordinator.url}/workers/alice/samples"
        with httpx.Client(headers=headers, trust_env=False, timeout=SOCKET_SECONDS) as client:
            return client.post(url, content=body).status_code

    with ThreadPoolExecutor(count) as pool:
        posts = [pool.submit(post) for _ in range(count)]
        for _ in range(bodies.PARSED_AT_ONCE):
            assert begun.acquire(timeout=SOCKET_SECONDS)
        beats = [alice.link.send(HeartbeatRequest(identity=alice.identity())) for _ in range(3)]
        assert not any(post.done() for post in posts)
        may_go_on.set()

        assert [post.result(SOCKET_SECONDS) for post in posts] == [422] * count
    assert len(beats) == 3
    assert most[0] == bodies.PARSED_AT_ONCE
