"""The control plane under bad input: bounded, typed, quiet, and still there afterwards."""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from atoll import errors
from atoll.client import http
from atoll.client.http import HttpClient
from atoll.coordinator.planes import server
from atoll.coordinator.planes.access import Role
from atoll.errors import (
    Accident,
    AtollError,
    ConfigError,
    CoordinatorUnreachable,
    FrameTooLarge,
    ProtocolError,
    StoreError,
)
from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import (
    AssignmentRequest,
    ErrorReply,
    HeartbeatRequest,
    InfoRequest,
    RegisterRequest,
    StatusRequest,
)
from atoll.wire import rpc, statuses
from atoll.wire.proto import transfer_pb2
from atoll.wire.transfer_calls import TransferCalls
from tests import served
from tests.served import SOCKET_SECONDS, TOKENS, Served, Worker

AUTHORIZED = {
    "authorization": f"Bearer {TOKENS[Role.WORKER]}",
    "content-type": "application/json",
}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(
        tmp_path_factory.mktemp("http") / "state", membership={"min_workers": 3}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def alice(coordinator: Served) -> Worker:
    return coordinator.worker("alice")


@pytest.fixture
def client(coordinator: Served) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=coordinator.url, headers=AUTHORIZED, trust_env=False, verify=False
    ) as made:
        yield made


def raw(port: int, data: bytes) -> bytes:
    """Everything that a connection answers to `data` until it is closed from the other side."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS) as connection:
        connection.sendall(data)
        answer = b""
        while piece := _receive(connection):
            answer += piece
        return answer


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def request_head(*lines: str) -> bytes:
    first = ("POST /workers/register HTTP/1.1", "Host: coordinator")
    token = f"Authorization: Bearer {TOKENS[Role.WORKER]}"
    return "\r\n".join([*first, token, *lines, "", ""]).encode()


def refusal(answer: bytes) -> tuple[int, ErrorReply]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), ErrorReply.model_validate_json(body)


# Bounded bodies


@pytest.mark.parametrize(
    "lines",
    [
        (f"Content-Length: {RegisterRequest.route.max_body_bytes + 1}",),
        ("Content-Length: 1000000",),
        ("Content-Length: 99999999999999999999",),
        ("Transfer-Encoding: chunked",),
        ("Transfer-Encoding: chunked", "Content-Type: application/json"),
    ],
)
def test_body_that_is_too_large_or_has_no_size_is_refused_before_any_of_it_is_sent(
    coordinator: Served, lines: tuple[str, ...]
) -> None:
    code, reply = refusal(raw(coordinator.address.port, request_head(*lines)))

    assert (code, reply.code, reply.retry) == (413, FrameTooLarge.code, False)


def test_open_path_takes_no_unbounded_body_either(coordinator: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    code, reply = refusal(raw(coordinator.address.port, head))

    assert (code, reply.code) == (413, FrameTooLarge.code)


def test_stranger_with_a_body_is_refused_before_any_of_it_is_sent(coordinator: Served) -> None:
    head = b"POST /workers/register HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"

    code, reply = refusal(raw(coordinator.address.port, head))

    assert (code, reply.code) == (401, errors.Unauthenticated.code)


def test_body_of_the_largest_size_is_read(client: httpx.Client) -> None:
    limit = RegisterRequest.route.max_body_bytes
    content = b'{"x": "' + b"a" * (limit - 9) + b'"}'

    reply = client.post("/workers/register", content=content)

    assert len(content) == limit
    assert (reply.status_code, reply.json()["code"]) == (422, ProtocolError.code)


def test_header_bomb_closes_the_connection(coordinator: Served) -> None:
    answer = raw(coordinator.address.port, b"GET /health HTTP/1.1\r\nX: " + b"a" * 1_000_000)

    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""


# Malformed bodies


MALFORMED = {
    "no json": b"{",
    "another type": b"[]",
    "nothing": b"",
    "deep nesting": b"[" * 250_000,
    "deep object": b'{"a":' * 50_000,
    "a huge number": b'{"run_id": ' + b"9" * 100_000 + b"}",
    "half a surrogate pair as a field": b'{"\\ud800": 1}',
    "half a surrogate pair as a value": b'{"run_id": "\\ud800"}',
    "a field name of many bytes": b'{"' + b"n" * 200_000 + b'": 1}',
    "no text": b"\xff\xfe\x00",
    "NaN": b'{"run_id": NaN}',
    "a key twice": b'{"run_id": "a", "run_id": "a"}',
    "a key twice inside": b'{"data_identity": {"block": 1, "block": 2}}',
    "an unknown key twice": b'{"x": 1, "x": 1}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_body_is_refused_by_name_and_changes_nothing(
    coordinator: Served, client: httpx.Client, name: str
) -> None:
    before = coordinator.coordinator.state_hash()

    reply = client.post("/workers/register", content=MALFORMED[name])

    assert reply.status_code in (400, 422)
    assert ErrorReply.model_validate_json(reply.content).code == ProtocolError.code
    assert len(reply.content) < 2000
    assert coordinator.coordinator.state_hash() == before


@pytest.mark.parametrize("value", ["\ud800", "x" * 200_000, [[[[1]]]], None])
def test_odd_values_of_free_fields_are_refused_in_a_bounded_sentence(
    coordinator: Served, alice: Worker, client: httpx.Client, value: object
) -> None:
    before = coordinator.coordinator.state_hash()
    body = alice.registration().model_dump()
    body["data_identity"] = {**body["data_identity"], "block": value}

    reply = client.post("/workers/register", content=json.dumps(body))

    assert reply.json()["code"] == errors.ManifestMismatch.code
    assert len(reply.content) < 2000
    assert coordinator.coordinator.state_hash() == before


@pytest.mark.parametrize(
    ("field", "shown"),
    [("colour", "colour"), ("\ud800", "unicode"), ("n" * 3_000, "n" * 300)],
    ids=["a word", "half a surrogate pair", "a long one"],
)
def test_unknown_field_is_refused_by_its_name_in_a_bounded_sentence(
    client: httpx.Client, alice: Worker, field: str, shown: str
) -> None:
    body = {**HeartbeatRequest(identity=alice.identity()).model_dump(), field: 1}

    reply = client.post("/workers/alice/heartbeat", content=json.dumps(body))

    assert reply.status_code == 422
    assert shown in reply.json()["message"]
    assert len(reply.content) < 2000


def test_key_that_stands_twice_is_named(client: httpx.Client, alice: Worker) -> None:
    body = HeartbeatRequest(identity=alice.identity()).model_dump_json()
    twice = body[:-1] + ',"acknowledged":0}'

    assert client.post("/workers/alice/heartbeat", content=body).status_code == 200
    reply = client.post("/workers/alice/heartbeat", content=twice)

    assert reply.status_code == 422
    assert "'acknowledged' stands 2 times" in reply.json()["message"]


@pytest.mark.parametrize("value", ["1", 1.0, True, "true", [1], -1, 2**53 + 1, "1.0"])
def test_integer_is_an_integer_and_nothing_that_could_pass_for_one(
    coordinator: Served, client: httpx.Client, alice: Worker, value: object
) -> None:
    body = HeartbeatRequest(identity=alice.identity()).model_dump()
    before = coordinator.coordinator.state_hash()

    for changed in (
        {**body, "acknowledged": value},
        {**body, "identity": {**body["identity"], "generation": value}},
    ):
        reply = client.post("/workers/alice/heartbeat", json=changed)
        assert (reply.status_code, reply.json()["code"]) == (422, ProtocolError.code)
    assert coordinator.coordinator.state_hash() == before


@pytest.mark.parametrize("value", ["1", True, "1.5"])
def test_number_is_a_number_and_no_text_or_truth(
    client: httpx.Client, alice: Worker, value: object
) -> None:
    body = HeartbeatRequest(identity=alice.identity()).model_dump()
    told = {**body, "telemetry": {**body["telemetry"], "tokens_per_second": value}}

    assert client.post("/workers/alice/heartbeat", json=told).status_code == 422
    told["telemetry"]["tokens_per_second"] = 1  # the control: an integer is a number
    assert client.post("/workers/alice/heartbeat", json=told).status_code == 200


@pytest.mark.parametrize(
    ("limit", "code"),
    [("5", 200), ("5.0", 422), ("+5", 422), (" 5", 422), ("5_0", 422), ("true", 422), ("٥", 422)],
)
def test_integer_in_an_address_is_spelled_in_digits(
    client: httpx.Client, limit: str, code: int
) -> None:
    asked = [("/metrics/history", "limit"), ("/metrics/history", "after"), ("/workers", "limit")]
    for path, name in (*asked, ("/work", "first"), ("/work", "limit")):
        assert client.get(path, params={name: limit}).status_code == code, (path, name)


def test_name_that_stands_twice_in_an_address_is_refused(client: httpx.Client) -> None:
    assert client.get("/workers?limit=5").status_code == 200

    reply = client.get("/workers?limit=5&limit=5")

    assert (reply.status_code, reply.json()["code"]) == (422, ProtocolError.code)
    assert "query: 'limit' stands 2 times" in reply.json()["message"]


@pytest.mark.parametrize("path", ["/control/", "/control%2f", "/status/", "/workers/", "/health/"])
def test_path_with_a_slash_behind_it_is_unknown_and_redirects_nowhere(
    client: httpx.Client, path: str
) -> None:
    headers = {"authorization": f"Bearer {TOKENS[Role.ADMIN]}", "host": "evil.example"}

    reply = client.get(path, headers=headers)

    assert reply.status_code == 404
    assert "location" not in reply.headers
    assert "evil" not in reply.text


@pytest.mark.parametrize(
    "values",
    [("good", "good"), ("good", "bad"), ("bad", "good"), ("good", "")],
)
def test_two_credentials_are_refused_on_both_planes_whichever_is_good(
    coordinator: Served, alice: Worker, values: tuple[str, str]
) -> None:
    tokens = {"good": f"Bearer {TOKENS[Role.WORKER]}", "bad": "Bearer no", "": "x"}
    sent = [("authorization", tokens[value]) for value in values]
    lines = "".join(f"Authorization: {value}\r\n" for _, value in sent)
    head = f"GET /info HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n\r\n"

    code, reply = refusal(raw(coordinator.address.port, head.encode()))

    assert (code, reply.code) == (401, errors.Unauthenticated.code)
    assert "stands 2 times" in reply.message
    opened = transfer_pb2.PresenceOpen(identity=served.proto_identity(alice.identity()))
    with (
        grpc.insecure_channel(f"127.0.0.1:{coordinator.address.transfer_port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        next(iter(TransferCalls(channel).presence(opened, metadata=sent)))
    found = rpc.error_of(refused.value)
    assert type(found) is errors.Unauthenticated
    assert "stands 2 times" in str(found)


def test_refusal_tells_paths_to_an_admin_and_the_log_and_to_no_worker(
    coordinator: Served,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = "/srv/secret place/blobs/ab/abcd"

    def full(*_: object) -> None:
        raise errors.StorageFull(f"no room to write {place!r} (see /srv/other/x); free some")

    monkeypatch.setattr(coordinator.coordinator, "status", full)
    admin = {"authorization": f"Bearer {TOKENS[Role.ADMIN]}"}

    shown = client.get("/metrics").json()["message"]
    to_admin = client.get("/metrics", headers=admin).json()["message"]

    assert shown == "no room to write '…/abcd' (see …/x); free some"
    assert place in to_admin
    assert any(place in str(getattr(record, "reason", "")) for record in caplog.records)


def test_refused_bodies_are_counted(coordinator: Served, client: httpx.Client) -> None:
    before = coordinator.coordinator.counters.refusals[ProtocolError.code]

    client.post("/workers/register", content=b"{}")

    assert coordinator.coordinator.counters.refusals[ProtocolError.code] == before + 1


@pytest.mark.parametrize(("path", "code"), [("/nothing", 404), ("/workers/register", 405)])
def test_paths_and_methods_that_do_not_exist_are_refused_in_the_one_shape(
    client: httpx.Client, path: str, code: int
) -> None:
    reply = client.get(path)

    assert reply.status_code == code
    assert ErrorReply.model_validate_json(reply.content).code == ProtocolError.code


# Garbage on the port

GARBAGE = {
    "zeros": b"\x00" * 200,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 30,
    "an SSH banner": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "lines": b"\r\n" * 40_000,
    "no line at all": b"\x81" * 100_000,
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_the_connection_and_the_next_one_is_served(
    coordinator: Served, alice: Worker, name: str
) -> None:
    answer = raw(coordinator.address.port, GARBAGE[name])

    assert answer == b"" or answer.split()[1] in (b"400", b"401")
    assert alice.link.send(HeartbeatRequest(identity=alice.identity())).generation > 0


def test_garbage_and_strangers_write_no_log_lines(
    coordinator: Served,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.WARNING)

    for data in (*GARBAGE.values(), os.urandom(3000) + b"\r\n\r\n"):
        raw(coordinator.address.port, data)
    with httpx.Client(base_url=coordinator.url, trust_env=False, verify=False) as stranger:
        codes = {stranger.get("/info").status_code for _ in range(20)}

    assert codes == {401}
    assert caplog.records == []
    assert capfd.readouterr().err == ""


# Errors cross the wire

TREE = errors.tree(AtollError)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.code)
def test_every_error_has_its_row_in_the_table_of_statuses(cls: type[AtollError]) -> None:
    assert cls.code in statuses.TABLE


def test_codes_of_errors_are_their_own() -> None:
    assert len({cls.code for cls in TREE}) == len(TREE)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.code)
def test_every_error_comes_back_as_the_same_class(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch, cls: type[AtollError]
) -> None:
    def refuse() -> None:
        raise cls("name=3 breaks the rule; do that")

    monkeypatch.setattr(coordinator.coordinator, "status", refuse)

    with pytest.raises(AtollError) as raised:
        alice.link.send(StatusRequest())

    assert type(raised.value) is cls
    assert str(raised.value) == "name=3 breaks the rule; do that"


def test_unexpected_error_is_logged_and_its_text_stays_here(
    coordinator: Served,
    alice: Worker,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def break_down() -> None:
        raise RuntimeError("password of /secret/path")

    monkeypatch.setattr(coordinator.coordinator, "status", break_down)

    reply = client.get("/status")

    assert reply.status_code == 500
    assert reply.json() == {"code": "INTERNAL", "message": str(Accident()), "retry": True}
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "password" in str(record.exc_info[1])


def test_island_tries_again_after_an_unexpected_error_of_the_coordinator(
    coordinator: Served,
    alice: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down() -> None:
        raise RuntimeError("password")

    monkeypatch.setattr(coordinator.coordinator, "status", break_down)

    with pytest.raises(CoordinatorUnreachable, match="an error of its own") as raised:
        alice.link.send(StatusRequest())

    assert raised.value.retry


def test_faults_of_the_coordinators_own_state_are_logged(
    coordinator: Served,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(coordinator.coordinator, "status", refuse)

    reply = client.get("/status")

    assert reply.status_code == 500
    assert [record.levelname for record in caplog.records if record.name.startswith("atoll")] == [
        "ERROR"
    ]


def test_long_sentence_keeps_its_beginning_and_its_way_out() -> None:
    error = ProtocolError("rows " + "7, " * 5000 + "are too many; send fewer")

    text = statuses.sentence(error)

    assert len(text) <= statuses.MAX_SENTENCE
    assert text.startswith("rows 7, ")
    assert text.endswith("are too many; send fewer")


def test_sentence_can_always_be_encoded() -> None:
    assert (
        statuses.sentence(ProtocolError("name=\ud800 …")).encode() == b"name=\\ud800 \xe2\x80\xa6"
    )


# The ledger's copy


def test_copy_of_the_ledger_is_a_whole_database(coordinator: Served, tmp_path: Path) -> None:
    path = tmp_path / "copy.sqlite"

    with path.open("wb") as file:
        coordinator.client().copy_ledger(file.write)

    from atoll.ledger import engines

    copy = engines.open_ledger(path)
    try:
        assert copy.state_hash() == coordinator.coordinator.state_hash()
    finally:
        copy.close()


def test_copy_of_the_ledger_that_cannot_be_made_is_refused_by_its_code(
    coordinator: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(coordinator.coordinator.ledger, "copy_to", refuse)

    with pytest.raises(StoreError, match="the disk is full"):
        coordinator.client().copy_ledger(lambda _: None)


# Long polls


def test_waiting_worker_hears_of_a_change_that_comes_while_it_is_being_answered(
    coordinator: Served, alice: Worker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = coordinator.coordinator.assignment
    answered: list[Any] = []

    def assignment(request: AssignmentRequest, *, begun: bool) -> Any:
        reply = real(request, begun=begun).model_copy(
            update={"action": "stop" if answered else "wait"}
        )
        if not answered:
            # The event loop, which serves the second request, knows of the change before it.
            coordinator.server.app.state.long_polls.notify()
            assert client.get("/health").status_code == 200
        answered.append(reply)
        return reply

    monkeypatch.setattr(coordinator.coordinator, "assignment", assignment)

    reply = alice.link.send(AssignmentRequest(identity=alice.identity(), wait_seconds=60.0))

    assert reply.action == "stop"


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Without it every answer takes 40 ms longer: its head and its body are two segments."""
    with (
        server.bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# What an island refuses to dial


@pytest.mark.parametrize(
    "url",
    [
        "coordinator:8760",
        "ftp://coordinator",
        "http://",
        "http://coordinator:port",
        "http://coordinator:99999",
        "http://user:password@coordinator",
        "http://coordinator/path",
        "http://[::1",
    ],
)
def test_url_that_is_no_coordinators_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be http://host:port"):
        NetworkLink(url, token="t")


@pytest.mark.parametrize("token", ["", "two words", "line\n", "tökén", "\x00"])
def test_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="the token holds"):
        NetworkLink("http://127.0.0.1:1", token=token)


def test_coordinator_that_is_not_there_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    link = NetworkLink(f"http://127.0.0.1:{port}", token="t")

    try:
        with pytest.raises(CoordinatorUnreachable):
            link.send(InfoRequest())
    finally:
        link.close()


@pytest.mark.parametrize(
    ("call", "status_line"),
    [("info", "200 OK"), ("info", "409 Conflict"), ("info", "500 Error"), ("ledger", "409 No")],
)
def test_reply_without_an_end_is_refused_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, call: str, status_line: str
) -> None:
    monkeypatch.setattr(http, "MAX_REPLY_BYTES", 10_000)
    # Whoever waits for the rest is told that nobody answers.
    monkeypatch.setattr(http, "CONTROL_SECONDS", 1.0)

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as accepted:
            accepted.recv(65536)
            head = f"HTTP/1.1 {status_line}\r\ncontent-length: {1 << 40}\r\n\r\n"
            accepted.sendall(head.encode() + b" " * 10_001)
            accepted.recv(1)  # until the other side hangs up

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        link = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", token="t")

        try:
            with pytest.raises(ProtocolError, match="with more than 10000 bytes"):
                link.send(InfoRequest()) if call == "info" else link.copy_ledger(lambda _: None)
        finally:
            link.close()
            answering.join(SOCKET_SECONDS)
