"""Large answers: few at a time, one for each asker, and only for who reads them."""

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from atoll.coordinator.planes import answer_places, server, write_timeout
from atoll.coordinator.planes.access import Role
from atoll.coordinator.planes.server import Listen
from atoll.coordinator.planes.write_timeout import TimedWrites
from atoll.errors import NotReady
from atoll.protocol.gather import WindowRequest
from atoll.protocol.messages import HeartbeatRequest, Identity
from atoll.protocol.samples import MAX_BATCH, MAX_PAGE, Sample, SamplesRequest
from tests import served
from tests.served import SOCKET_SECONDS, TOKENS, Served, Worker

UNREAD = 40
PATH = "/metrics/history"


@contextmanager
def serving(home: Any, **limits: float) -> Iterator[tuple[Served, Worker]]:
    """A coordinator with a whole page of samples, and who sent them."""
    with served.serving(home / "state", limits=limits, membership={"min_workers": 3}) as running:
        alice = running.worker("alice")
        for first in range(0, MAX_PAGE, MAX_BATCH):
            samples = tuple(
                Sample(sequence=first + n + 1, wall=1e9 / 3, round=1, step=n, loss=1 / 3)
                for n in range(MAX_BATCH)
            )
            alice.link.send(SamplesRequest(identity=alice.identity(), life=1, samples=samples))
        yield running, alice


@pytest.fixture(scope="module", autouse=True)
def small_kernel_buffers() -> Iterator[None]:
    """What the kernel takes is not unread to the server; by itself it takes megabytes."""
    real = server.bind

    def bind(host: str, port: int) -> socket.socket:
        listener = real(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "bind", bind)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Worker]]:
    """With time for everything: whatever waits here waits for a reason."""
    with serving(
        tmp_path_factory.mktemp("patient"), write_seconds=600.0, wait_seconds=600.0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Worker]]:
    """With short limits."""
    with serving(tmp_path_factory.mktemp("hasty"), write_seconds=0.5, wait_seconds=0.5) as made:
        yield made


def unread(coordinator: Served, *, source: str = "127.0.0.1") -> socket.socket:
    """A connection that asks for a page and reads nothing of it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(SOCKET_SECONDS)
    made.bind((source, 0))
    made.connect(("127.0.0.1", coordinator.address.port))
    token = TOKENS[Role.WORKER]
    made.sendall(
        f"GET {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    return made


def client(
    coordinator: Served, role: Role = Role.WORKER, *, source: str = "127.0.0.1"
) -> httpx.Client:
    return httpx.Client(
        base_url=coordinator.url,
        headers={"authorization": f"Bearer {TOKENS[role]}"},
        transport=httpx.HTTPTransport(local_address=source),
        timeout=SOCKET_SECONDS,
    )


def was_broken_off(connection: socket.socket) -> bool:
    """Whether the server ends the connection though nothing of its answer was read."""
    watch = select.poll()
    watch.register(connection, 0)  # only its end
    return bool(watch.poll(SOCKET_SECONDS * 1000))


@dataclass
class Gate:
    """Stands in the way of every page that is made, and counts them."""

    real: Any
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_go_on: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: int = 0

    def __call__(self, **asked: Any) -> Any:
        with self.lock:
            self.made += 1
        self.begun.release()
        assert self.may_go_on.wait(SOCKET_SECONDS)
        return self.real(**asked)

    def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=SOCKET_SECONDS)


@pytest.fixture
def gate(pair: tuple[Served, Worker], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    store = pair[0].coordinator.samples
    made = Gate(store.history)
    monkeypatch.setattr(store, "history", made)
    yield made
    made.may_go_on.set()


def asked(pool: ThreadPoolExecutor, coordinator: Served, sources: list[str]) -> list[Future[int]]:
    def ask(source: str) -> int:
        with client(coordinator, source=source) as one:
            return one.get(PATH).status_code

    return [pool.submit(ask, source) for source in sources]


# Places


def test_large_answers_to_one_address_are_made_one_at_a_time(
    pair: tuple[Served, Worker], gate: Gate
) -> None:
    coordinator, alice = pair
    with ThreadPoolExecutor(6) as pool:
        replies = asked(pool, coordinator, ["127.0.0.1"] * 6)
        gate.wait_begun(1)
        with client(coordinator, source="127.0.0.9") as other:
            assert other.get("/status").status_code == 200
        alice.link.send(HeartbeatRequest(identity=alice.identity()))

        assert gate.made == 1
        gate.may_go_on.set()
        assert [reply.result(SOCKET_SECONDS) for reply in replies] == [200] * 6


def test_large_answers_to_workers_are_four_at_a_time_and_an_admin_has_a_place_beside_them(
    pair: tuple[Served, Worker], gate: Gate
) -> None:
    coordinator, alice = pair
    with ThreadPoolExecutor(7) as pool:
        replies = asked(pool, coordinator, [f"127.0.0.{n}" for n in range(2, 9)])
        gate.wait_begun(answer_places.PLACES)
        with client(coordinator, Role.ADMIN) as admin:
            shown = [admin.get(path).status_code for path in ("/status", "/workers", "/metrics")]
        alice.link.send(HeartbeatRequest(identity=alice.identity()))

        assert shown == [200] * 3
        assert gate.made == answer_places.PLACES == 4
        gate.may_go_on.set()
        assert [reply.result(SOCKET_SECONDS) for reply in replies] == [200] * 7


def test_worker_that_shows_its_key_has_a_place_of_its_own(
    hasty: tuple[Served, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, alice = hasty
    store = coordinator.coordinator.samples
    gate = Gate(store.history)
    monkeypatch.setattr(store, "history", gate)
    forged = Identity.model_validate({**alice.identity().model_dump(), "island_key": "0" * 64})

    def window(identity: Identity) -> httpx.Response:
        body = WindowRequest(identity=identity, round=1).model_dump_json()
        with client(coordinator) as one:
            return one.post("/windows/1", content=body)

    with ThreadPoolExecutor(1) as pool:
        [reply] = asked(pool, coordinator, ["127.0.0.1"])
        gate.wait_begun(1)

        own, others = window(alice.identity()), window(forged)

        gate.may_go_on.set()
        assert reply.result(SOCKET_SECONDS) == 200
    # A run of this kind has no windows; what counts is that it was looked at.
    assert own.json()["code"] != NotReady.code
    assert others.json()["code"] == NotReady.code


def test_who_waits_too_long_for_a_place_is_told_to_ask_again(
    hasty: tuple[Served, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = hasty
    store = coordinator.coordinator.samples
    gate = Gate(store.history)
    monkeypatch.setattr(store, "history", gate)
    with ThreadPoolExecutor(1) as pool:
        [first] = asked(pool, coordinator, ["127.0.0.1"])
        gate.wait_begun(1)
        with client(coordinator) as one:
            second = one.get("/status")
        gate.may_go_on.set()

        assert first.result(SOCKET_SECONDS) == 200
    assert second.status_code == 503
    assert (second.json()["code"], second.json()["retry"]) == (NotReady.code, True)
    assert "address 127.0.0.1 waited 0.5 s" in second.json()["message"]


def test_place_is_given_back_by_an_answer_that_fails(
    hasty: tuple[Served, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = hasty
    with client(coordinator) as one:
        with monkeypatch.context() as patched:
            patched.setattr(coordinator.coordinator.samples, "history", lambda **_: 1 / 0)
            failed = [one.get(PATH).status_code for _ in range(answer_places.PLACES + 1)]

        assert failed == [500] * (answer_places.PLACES + 1)
        assert one.get(PATH).status_code == 200


# Who does not read


def test_answers_that_nobody_reads_are_not_made_but_one(
    pair: tuple[Served, Worker], gate: Gate
) -> None:
    coordinator, alice = pair
    gate.may_go_on.set()
    with ExitStack() as opened:
        for _ in range(UNREAD):
            opened.enter_context(unread(coordinator))
        gate.wait_begun(1)
        with client(coordinator, Role.ADMIN) as admin:
            assert len(admin.get(PATH).json()["samples"]) == MAX_PAGE
        with client(coordinator, source="127.0.0.9") as other:
            assert len(other.get(PATH).json()["samples"]) == MAX_PAGE
        alice.link.send(HeartbeatRequest(identity=alice.identity()))

        assert gate.made == 3


def test_connection_whose_answer_is_not_read_is_broken_off(hasty: tuple[Served, Worker]) -> None:
    coordinator, alice = hasty
    with unread(coordinator) as connection:
        assert was_broken_off(connection)

    with client(coordinator) as one:
        assert len(one.get(PATH).json()["samples"]) == MAX_PAGE
    alice.link.send(HeartbeatRequest(identity=alice.identity()))


@dataclass
class Clockwork:
    """The loop and the transport of a connection, as far as the limit of writing sees them."""

    left: int
    is_aborted: bool = False
    due: list[tuple[float, Any, tuple[Any, ...]]] = field(default_factory=list)

    def call_later(self, seconds: float, call: Any, *given: Any) -> None:
        self.due.append((seconds, call, given))

    def get_write_buffer_size(self) -> int:
        return self.left

    def get_extra_info(self, _: str) -> Any:
        return self

    def setsockopt(self, *_: Any) -> None:
        """A socket too, whose options do not matter here."""

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    ("taken", "is_aborted"),
    [(write_timeout.PROGRESS_BYTES, False), (write_timeout.PROGRESS_BYTES - 1, True)],
)
def test_reader_that_reads_on_is_given_more_time(taken: int, is_aborted: bool) -> None:
    connection = TimedWrites.__new__(TimedWrites)
    works = Clockwork(left=1 << 20)
    connection.loop = connection.transport = works  # type: ignore[assignment]

    connection.watch()
    [(seconds, look, given)] = works.due
    works.left -= taken
    look(*given)

    assert seconds == write_timeout.WRITE_SECONDS
    assert works.is_aborted is is_aborted
    assert len(works.due) == (1 if is_aborted else 2)


def test_limits_are_ten_seconds_unless_others_are_given() -> None:
    assert (Listen().write_seconds, Listen().wait_seconds) == (10.0, 10.0)
