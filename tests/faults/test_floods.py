"""One worker token against a real coordinator: lists of a megabyte, and answers that nobody reads.

Numbers are ATOLL_FLOOD_LISTS and ATOLL_FLOOD_UNREAD (`make storm` sets those of the attack).
"""

import os
import random
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from atoll.clock import SystemClock
from atoll.errors import FrameTooLarge
from atoll.island.conversation.session import Session, look
from atoll.island.driver import Driver
from atoll.island.link.network import NetworkLink
from atoll.island.state.store import IslandIdentity
from atoll.launch.local import LocalCoordinator
from atoll.protocol.messages import ErrorReply, HeartbeatRequest, Identity
from atoll.protocol.samples import MAX_BATCH, MAX_PAGE, HistoryRequest, Sample, SamplesRequest
from tests.processes import LIMIT_SECONDS, TOKENS, Cluster, Settings

pytestmark = [pytest.mark.storm, pytest.mark.xdist_group("storm")]

LISTS = int(os.environ.get("ATOLL_FLOOD_LISTS", "2"))
UNREAD = int(os.environ.get("ATOLL_FLOOD_UNREAD", "60"))
ITEMS = 340_000
GROWTH_BYTES = 40 << 20  # of 1,648 MB and 1,498 MB, which lists and answers once took
CREDENTIAL = f"Host: x\r\nAuthorization: Bearer {TOKENS.worker}"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    home = tmp_path_factory.mktemp("floods")
    with Cluster(home, Settings(heartbeat_timeout=600.0, min_workers=2)) as cluster:
        yield cluster.serve()


@pytest.fixture(scope="module")
def honest(coordinator: LocalCoordinator) -> Iterator[tuple[NetworkLink, Identity]]:
    """A worker that is a member and has sent a whole page of samples."""
    with closing(NetworkLink(coordinator.url, token=TOKENS.worker)) as link:
        driver, jitter = Driver(link, SystemClock()), random.Random(0)
        info = driver.run(look(jitter))
        session = Session(IslandIdentity("honest", "a" * 64), info, jitter)
        driver.run(
            session.register(layout_digest=info.model_hash, data_identity=info.data.identity)
        )
        identity = session.standing.identity()
        for first in range(0, MAX_PAGE, MAX_BATCH):
            samples = tuple(
                Sample(sequence=first + n + 1, wall=1e9 / 3, round=1, step=n, loss=1 / 3)
                for n in range(MAX_BATCH)
            )
            link.send(SamplesRequest(identity=identity, life=1, samples=samples))
        for _ in range(5):  # what one such answer takes is no growth
            assert len(link.send(HistoryRequest()).samples) == MAX_PAGE
        yield link, identity


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [one for one in status.splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def connected(coordinator: LocalCoordinator) -> socket.socket:
    host, port = coordinator.url.removeprefix("http://").split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(LIMIT_SECONDS)
    made.connect((host, int(port)))
    return made


def refusal(connection: socket.socket) -> ErrorReply:
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return ErrorReply.model_validate_json(answer.partition(b"\r\n\r\n")[2])


def test_lists_of_a_megabyte_cost_next_to_nothing(
    coordinator: LocalCoordinator, honest: tuple[NetworkLink, Identity]
) -> None:
    link, identity = honest
    before = peak_bytes(coordinator.pid)
    who = identity.model_dump_json()
    body = f'{{"identity":{who},"life":1,"samples":[{",".join(["{}"] * ITEMS)}]}}'.encode()
    size = f"Content-Length: {len(body)}\r\n\r\n"
    head = f"POST /workers/zzz/samples HTTP/1.1\r\n{CREDENTIAL}\r\n{size}"

    for _ in range(LISTS):
        with connected(coordinator) as connection:
            connection.sendall(head.encode())
            # It is refused by its head; an attacker does not wait for that.
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(body)
            link.send(HeartbeatRequest(identity=identity))
    with connected(coordinator) as connection:
        connection.sendall(head.encode())
        reply = refusal(connection)

    assert len(body) > 1_000_000
    assert reply.code == FrameTooLarge.code
    assert peak_bytes(coordinator.pid) - before < GROWTH_BYTES


def test_answers_that_nobody_reads_cost_one_of_them_and_end(
    coordinator: LocalCoordinator, honest: tuple[NetworkLink, Identity]
) -> None:
    link, identity = honest
    before = peak_bytes(coordinator.pid)
    request = f"GET /metrics/history?limit={MAX_PAGE} HTTP/1.1\r\n{CREDENTIAL}\r\nConnection: close"
    with ExitStack() as opened:
        unread = [opened.enter_context(connected(coordinator)) for _ in range(UNREAD)]
        for connection in unread:
            connection.sendall(f"{request}\r\n\r\n".encode())
        for _ in range(5):
            link.send(HeartbeatRequest(identity=identity))
        with closing(NetworkLink(coordinator.url, token=TOKENS.admin)) as admin:
            assert len(admin.send(HistoryRequest()).samples) == MAX_PAGE
        # Each is sent, refused or broken off within the limits of waiting and of writing.
        ended = [_has_an_answer_or_end(connection) for connection in unread]

        assert all(ended)
    assert peak_bytes(coordinator.pid) - before < GROWTH_BYTES
    assert len(link.send(HistoryRequest()).samples) == MAX_PAGE


def _has_an_answer_or_end(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], LIMIT_SECONDS)[0])
