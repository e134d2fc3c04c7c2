"""A whole coordinator in this process, on free ports, and workers that speak to it by hand.

The server is the real one: both planes, in a thread of its own. A worker here builds its messages
and frames itself, so that a test can break exactly one thing.
"""

import hashlib
import random
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from atoll import config
from atoll.client.http import HttpClient
from atoll.clock import Clock, SystemClock
from atoll.coordinator import boot
from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.planes.server import Address, Listen, Server
from atoll.coordinator.service import Coordinator
from atoll.island.conversation.asking import question
from atoll.island.conversation.hand_in import header_of
from atoll.island.conversation.intents import Trained
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Adopted, Standing
from atoll.island.link.network import NetworkLink
from atoll.island.state.store import IslandIdentity
from atoll.layout import byte_view
from atoll.ledger.ledger import Ledger
from atoll.protocol.messages import Assignment, Identity, RegisterReply, RegisterRequest
from atoll.wire import frame, rpc
from atoll.wire.certificate import Certificate
from atoll.wire.header import FrameHeader
from atoll.wire.proto import transfer_pb2, transfer_pb2_grpc
from tests import clusters

TOKENS = {Role.WORKER: "worker-token-of-the-tests", Role.ADMIN: "admin-token-of-the-tests"}
START_SECONDS = 30.0
WAIT_SECONDS = 20.0
SOCKET_SECONDS = 20.0  # far above what any answer takes; reached only when something is broken
# What a scanner sends to any port it finds.
SCANS = (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 300, b"\x16\x03\x01\x00\x05hello" * 9)


def run_table(**changes: Any) -> dict[str, Any]:
    """A run file's table: a tiny model, workers that never time out, no end in sight."""
    table: dict[str, Any] = {
        "name": "served",
        "seed": 3,
        "sync_every": 1,
        "heartbeat_interval": 600.0,
        "heartbeat_timeout": 6000.0,
        "model": {
            "architecture": "gpt",
            "vocab": 256,
            "block": 8,
            "layers": 1,
            "heads": 1,
            "width": 8,
        },
        "data": {"kind": "synthetic", "seed": 1, "rows": 100_000, "held_out_rows": 4, "block": 8},
        "inner": {"batch": 2},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "evaluate": {"every": 0},
        "stop": {"rounds": 100_000},
        "storage": {"snapshot_every": 100_000},
    }
    return {**table, **changes}


@dataclass
class Served:
    """A coordinator that answers at `url` and `transfer_port`."""

    coordinator: Coordinator
    ledger: Ledger
    server: Server
    address: Address
    directory: Path
    certificate: Certificate | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # the server, by itself or not
    _open: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        scheme = "http" if self.certificate is None else "https"
        host = "[::1]" if ":" in self.address.host else "127.0.0.1"
        return f"{scheme}://{host}:{self.address.port}"

    def client(self) -> HttpClient:
        """What an operator's tools hold; closed with the server."""
        made = HttpClient(self.url, token=TOKENS[Role.ADMIN])
        self._open.append(made)
        return made

    def link(self, role: Role = Role.WORKER, **changes: Any) -> NetworkLink:
        """An island's connections; closed with the server."""
        pin = None if self.certificate is None else self.certificate.fingerprint
        made = NetworkLink(self.url, **{"token": TOKENS[role], "fingerprint": pin, **changes})
        self._open.append(made)
        return made

    def channel(self) -> grpc.Channel:
        """A bare gRPC channel without any limits of its own."""
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        made = grpc.insecure_channel(f"127.0.0.1:{self.address.transfer_port}", options=options)
        self._open.append(made)
        return made

    def stub(self) -> transfer_pb2_grpc.TransferStub:
        """The generated client on a bare channel."""
        return transfer_pb2_grpc.TransferStub(self.channel())

    def worker(self, name: str) -> "Worker":
        """A registered worker with a key of its own."""
        made = Worker(self, name)
        made.register()
        return made

    def close(self) -> None:
        for made in self._open:
            made.close()


@contextmanager
def serving(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    certificate: Certificate | None = None,
    clock: Clock | None = None,
    stay: bool = True,
    limits: dict[str, Any] | None = None,
    ledger: str | None = None,
    **changes: Any,
) -> Iterator[Served]:
    """Serves a fresh run in `directory` until the block ends; `changes` go to its run file.

    `limits` are seconds of `Listen`.
    """
    clock = clock or SystemClock()
    ended = threading.Event()
    directory.mkdir(parents=True, exist_ok=True)
    stores = clusters.stores_in(directory, ledger=ledger)
    opened = stores.ledger
    boot.create_or_check(
        stores, config.parse(run_table(**changes)), clock, new_run_id="run-of-the-tests"
    )
    hashes = {role.value: access.token_hash(token) for role, token in TOKENS.items()}
    with opened.writing() as transaction:
        transaction.credentials.set(hashes)
    coordinator = boot.open_coordinator(stores, clock)
    server = Server(
        coordinator,
        Access(hashes),
        clock,
        listen=Listen(host=host, port=0, certificate=certificate, stay=stay, **(limits or {})),
    )
    try:
        with running(server, ended) as address:
            served = Served(coordinator, opened, server, address, directory, certificate, ended)
            try:
                yield served
            finally:
                served.close()
    finally:
        opened.close()
        stores.blobs.close()


@contextmanager
def typed_errors() -> Iterator[None]:
    """What a call of a bare stub raises, as an island gets it."""
    try:
        yield
    except grpc.RpcError as exc:
        raise rpc.error_of(exc) from exc


@contextmanager
def running(server: Server, ended: threading.Event) -> Iterator[Address]:
    """Runs `server` in a thread until the block ends; what it raises is raised here."""
    ready = threading.Event()
    addresses: list[Address] = []
    failures: list[BaseException] = []

    def on_ready(address: Address) -> None:
        addresses.append(address)
        ready.set()

    def work() -> None:
        try:
            server.run(on_ready, signals=())
        except BaseException as exc:
            failures.append(exc)
        finally:
            ended.set()
            ready.set()

    thread = threading.Thread(target=work, name="served")
    thread.start()
    try:
        assert ready.wait(START_SECONDS)
        if not failures:
            yield addresses[0]
    finally:
        server.stop()
        thread.join(START_SECONDS)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


@dataclass(frozen=True)
class BytesFrame:
    """A frame in memory; fulfils `link.FrameSource`."""

    preamble: bytes
    sha256: str
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]


class Worker:
    """One worker_id with its key, its incarnation and its link."""

    def __init__(self, served: Served, name: str, *, island_key: str | None = None) -> None:
        self.served = served
        self.name = name
        self.island_key = island_key or secrets.token_hex(32)
        self.link = served.link()
        self.session = Session(
            IslandIdentity(name, self.island_key), served.coordinator.info(), random.Random(name)
        )

    @property
    def standing(self) -> Standing:
        """Under the manifest in force, in the present generation."""
        found = self.session.standing
        found.heard_of(self.served.coordinator.info())
        found.told(self.served.coordinator.generation)
        return found

    def registration(self, **changes: Any) -> RegisterRequest:
        """The message with which this worker registers."""
        coordinator = self.served.coordinator
        said = self.standing.registration(
            layout_digest=coordinator.layout.digest,
            data_identity=coordinator.manifest.data.identity,
        )
        return RegisterRequest.model_validate({**said.model_dump(), **changes})

    def register(self, **changes: Any) -> RegisterReply:
        """Takes part from now on, under this name and key."""
        reply = self.link.send(self.registration(**changes))
        self.session.standing.joined(reply)
        return reply

    def identity(self, **changes: Any) -> Identity:
        """Who this worker says it is."""
        return Identity.model_validate({**self.standing.identity().model_dump(), **changes})

    def assignment(self) -> Assignment:
        """The rows to train next, as a worker that holds the published weights asks for them."""
        reply = self.link.send(question(self.identity(), None, None))
        while reply.action == "fetch" or reply.upcoming:
            held = reply.version, reply.digest
            reply = self.link.send(question(self.identity(), *held, upcoming=reply.upcoming))
        assert reply.action == "train", reply
        return reply

    def header(self, assignment: Assignment) -> FrameHeader:
        """The header of this worker's contribution to the assigned round."""
        coordinator = self.served.coordinator
        self.session.adopted = Adopted.of(self.standing.info)
        rows = sum(map(len, assignment.ranges))
        tokens = rows * int(coordinator.manifest.data.identity["block"])
        assert assignment.round is not None
        return header_of(
            self.session,
            clusters.Held.of(coordinator, assignment),
            assignment,
            Trained(1.0, tokens, rows),
            began=assignment.round,
        )

    def frame(self, assignment: Assignment | None = None, **changes: Any) -> BytesFrame:
        """A good fp32 contribution to the next round; `changes` go into its header."""
        header = replace(self.header(assignment or self.assignment()), **changes)
        pieces = bytearray()
        writer = frame.FrameWriter(header, pieces.extend)
        values = torch.full((self.served.coordinator.layout.size,), 1e-3)
        writer.payload(byte_view(values.view(torch.uint8)))
        writer.finish()
        data = bytes(pieces)
        return BytesFrame(frame.preamble(header), hashlib.sha256(data).hexdigest(), data)


def knock(port: int, data: bytes) -> None:
    """Sends `data` and reads until the other side closes; TimeoutError when it does not."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS) as connection:
        connection.sendall(data)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass


def metadata(token: str = TOKENS[Role.WORKER]) -> tuple[tuple[str, str], ...]:
    """What a gRPC call carries."""
    return (("authorization", f"Bearer {token}"),)


def proto_identity(identity: Identity) -> transfer_pb2.Identity:
    """The data plane's spelling of an identity."""
    return transfer_pb2.Identity(**identity.model_dump())


def upload_open(
    identity: Identity, source: BytesFrame, /, **changes: Any
) -> transfer_pb2.UploadOpen:
    """The first message of an upload of `source`."""
    fields: dict[str, Any] = {
        "identity": proto_identity(identity),
        "preamble": source.preamble,
        "sha256": source.sha256,
        "nbytes": source.nbytes,
    }
    return transfer_pb2.UploadOpen(**{**fields, **changes})
