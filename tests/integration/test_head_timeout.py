"""Connections that never finish their request's head are closed; answers may take their time."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atoll.coordinator.planes.server import Listen
from atoll.protocol.messages import AssignmentRequest
from tests import served
from tests.served import SOCKET_SECONDS, Served

# Short for the tests, and long against what a busy machine needs from connect to the last byte.
HEAD_SECONDS = 1.0
STEP_SECONDS = 0.05
HALF = b"GET /health HTTP/1.1\r\nHost: coordinator\r\nX-"
WHOLE = b"GET /health HTTP/1.1\r\nHost: coordinator\r\n\r\n"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(
        tmp_path_factory.mktemp("heads") / "state",
        limits={"head_seconds": HEAD_SECONDS},
        membership={"min_workers": 3},
    ) as running:
        yield running


@pytest.fixture
def connection(coordinator: Served) -> Iterator[socket.socket]:
    with connected(coordinator) as made:
        yield made


def connected(coordinator: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", coordinator.address.port), timeout=SOCKET_SECONDS)


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes; TimeoutError when it never does."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def answer(connection: socket.socket) -> bytes:
    """One whole answer of /health."""
    found = b""
    while not found.endswith(b"}"):
        piece = connection.recv(65536)
        assert piece, found
        found += piece
    return found


@pytest.mark.parametrize(
    "sent", [b"", b"G", HALF, WHOLE[:-1]], ids=["nothing", "a byte", "half", "all but a byte"]
)
def test_connection_without_a_whole_head_is_closed(connection: socket.socket, sent: bytes) -> None:
    connection.sendall(sent)

    assert rest(connection) == b""


def test_head_that_drips_is_given_no_more_time(connection: socket.socket) -> None:
    connection.sendall(HALF)
    connection.settimeout(STEP_SECONDS)

    # Far fewer bytes than a head may have, in far more time than it is given.
    closed = any(_closed_after_one_more_byte(connection) for _ in range(400))

    assert closed


def _closed_after_one_more_byte(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"a")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except (ConnectionResetError, BrokenPipeError):
        return True


def test_half_a_head_after_an_answer_closes_the_connection(connection: socket.socket) -> None:
    connection.sendall(WHOLE)
    first = answer(connection)

    connection.sendall(HALF)

    assert first.startswith(b"HTTP/1.1 200 ")
    assert rest(connection) == b""


def test_half_a_head_that_came_with_the_request_before_it_closes_the_connection(
    connection: socket.socket,
) -> None:
    connection.sendall(WHOLE + HALF)

    assert rest(connection).startswith(b"HTTP/1.1 200 ")


def test_idle_connection_serves_again_after_the_limit(
    coordinator: Served, connection: socket.socket
) -> None:
    connection.sendall(WHOLE)
    answer(connection)
    let_the_limit_pass(coordinator)

    connection.sendall(WHOLE)

    assert answer(connection).startswith(b"HTTP/1.1 200 ")


def test_head_in_two_pieces_is_served(connection: socket.socket) -> None:
    connection.sendall(WHOLE[:20])
    connection.sendall(WHOLE[20:])

    assert answer(connection).startswith(b"HTTP/1.1 200 ")


def test_answer_that_takes_longer_than_the_limit_is_not_cut(
    coordinator: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = coordinator.worker("alice")
    real = coordinator.coordinator.assignment
    asked, may_stop = threading.Event(), threading.Event()

    def assignment(request: AssignmentRequest, **how: Any) -> Any:
        reply = real(request, **how)
        asked.set()
        return reply.model_copy(update={"action": "stop" if may_stop.is_set() else "wait"})

    monkeypatch.setattr(coordinator.coordinator, "assignment", assignment)
    request = AssignmentRequest(identity=alice.identity(), wait_seconds=60.0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(alice.link.send, request)
        assert asked.wait(SOCKET_SECONDS)
        let_the_limit_pass(coordinator)
        may_stop.set()
        coordinator.server.app.state.long_polls.notify()

        assert waiting.result(SOCKET_SECONDS).action == "stop"


def let_the_limit_pass(coordinator: Served) -> None:
    """Returns once a connection that was opened now has been closed for its half head."""
    with connected(coordinator) as other:
        other.sendall(HALF)
        assert rest(other) == b""


def test_limit_is_ten_seconds_unless_another_is_given() -> None:
    assert Listen().head_seconds == 10.0
