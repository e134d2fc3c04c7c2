"""`atoll serve` on any address: who gets a certificate, who pins it, and what strangers learn."""

import datetime
import hashlib
import json
import logging
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.cli import serve as command
from atoll.cli.serve import ServeOptions
from atoll.coordinator import certificate
from atoll.coordinator.access import Role
from atoll.coordinator.certificate import Certificate
from atoll.coordinator.server import Server
from atoll.errors import ConfigError, CoordinatorUnreachable, Unauthenticated
from atoll.island import pinning
from atoll.island.link import DownloadProgress
from atoll.island.network import NetworkLink
from atoll.launch import local
from atoll.wire.proto import transfer_pb2
from tests import served
from tests.served import TOKENS, Served

NOW = datetime.datetime.now(datetime.UTC)
SOCKET_SECONDS = 20.0
RUN_FILE = """
name = "served"
sync_every = 1
[model]
architecture = "gpt"
vocab = 256
block = 8
layers = 1
heads = 1
width = 8
[data]
kind = "synthetic"
seed = 1
rows = 1000
held_out_rows = 4
block = 8
[stop]
rounds = 10
"""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A coordinator on every address of this machine, with its own certificate."""
    directory = tmp_path_factory.mktemp("tls")
    own = certificate.own(directory, host="0.0.0.0", now=NOW)
    with served.serving(directory / "state", host="0.0.0.0", certificate=own) as running:
        yield running


def has_ipv6() -> bool:
    """Whether this machine's kernel has given any interface an IPv6 address."""
    addresses = Path("/proc/net/if_inet6")
    return addresses.exists() and bool(addresses.read_text().strip())


@dataclass
class Impostor:
    """Somebody else's TLS server; keeps what it was told after the handshake."""

    certificate: Certificate
    port: int = 0
    told: bytearray = field(default_factory=bytearray)
    handshakes: list[bool] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def impostor(directory: Path) -> Iterator[Impostor]:
    directory.mkdir(parents=True, exist_ok=True)
    found = Impostor(certificate.own(directory, host="127.0.0.1", now=NOW))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(found.certificate.certificate_path, found.certificate.key_path)
    context.set_alpn_protocols(["h2", "http/1.1"])
    listener = socket.create_server(("127.0.0.1", 0))
    found.port = listener.getsockname()[1]

    def listen() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain:
                _answer(plain, context, found)
            found.ended.set()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield found
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SOCKET_SECONDS)


def _answer(plain: socket.socket, context: ssl.SSLContext, found: Impostor) -> None:
    plain.settimeout(SOCKET_SECONDS)
    try:
        with context.wrap_socket(plain, server_side=True) as secured:
            found.handshakes.append(True)
            while data := secured.recv(65536):
                found.told += data
    except OSError:
        found.handshakes.append(False)


@contextmanager
def commanded(options: ServeOptions) -> Iterator[Server]:
    """`atoll serve` in a thread, until the block ends."""
    servers: list[Server] = []
    failures: list[BaseException] = []
    ready = threading.Event()

    def started(server: Server) -> None:
        servers.append(server)
        ready.set()

    def work() -> None:
        try:
            command.serve(options, signals=(), started=started)
        except BaseException as exc:
            failures.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(served.START_SECONDS)
        if not failures:
            yield servers[0]
    finally:
        for server in servers:
            server.stop()
        thread.join(served.START_SECONDS)
    if failures:
        raise failures[0]


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    return ServeOptions(
        run_file=run_file,
        directory=tmp_path / "state",
        host="0.0.0.0",
        port=0,
        ready_file=tmp_path / "ready.json",
    )


def port_of(options: ServeOptions) -> int:
    assert options.ready_file is not None
    return int(json.loads(options.ready_file.read_text())["url"].rpartition(":")[2])


def with_changes(options: ServeOptions, **changes: object) -> ServeOptions:
    return ServeOptions(**{**options.__dict__, **changes})


# The certificate


def test_own_certificate_has_an_elliptic_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        made = certificate.own(tmp_path, host="0.0.0.0", now=NOW)
    finally:
        os.umask(umask)

    key = serialization.load_pem_private_key(made.key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_own_certificate_is_kept_over_restarts(tmp_path: Path) -> None:
    first = certificate.own(tmp_path, host="0.0.0.0", now=NOW).fingerprint

    second = certificate.own(tmp_path, host="0.0.0.0", now=NOW + datetime.timedelta(days=9))

    assert second.fingerprint == first


def test_own_certificate_is_made_again_when_a_crash_left_only_its_key(tmp_path: Path) -> None:
    first = certificate.own(tmp_path, host="0.0.0.0", now=NOW).fingerprint
    (tmp_path / "certificate.pem").rename(tmp_path / "certificate.pem.part")

    second = certificate.own(tmp_path, host="0.0.0.0", now=NOW)

    assert second.fingerprint != first
    assert certificate.given(second.certificate_path, second.key_path) == second


def test_fingerprint_is_the_one_that_a_client_sees(coordinator: Served) -> None:
    assert coordinator.certificate is not None

    pem = ssl.get_server_certificate(("127.0.0.1", coordinator.address.port))

    der = ssl.PEM_cert_to_DER_cert(pem)
    assert coordinator.certificate.fingerprint == f"sha256:{hashlib.sha256(der).hexdigest()}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_certificate(options: ServeOptions, tmp_path: Path, host: str) -> None:
    assert command._certificate(with_changes(options, host=host), tmp_path) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", "::ffff:127.0.0.1"])
def test_other_addresses_get_a_certificate_unless_plain_text_is_asked_for(
    options: ServeOptions, tmp_path: Path, host: str
) -> None:
    secured = command._certificate(with_changes(options, host=host), tmp_path)
    plain = command._certificate(with_changes(options, host=host, insecure=True), tmp_path)

    assert isinstance(secured, Certificate)
    assert plain is None


@pytest.mark.parametrize("given", ["cert", "key"])
def test_one_of_the_two_files_alone_is_refused(
    options: ServeOptions, tmp_path: Path, given: str
) -> None:
    with pytest.raises(ConfigError, match="--cert and --key go together"):
        command._certificate(with_changes(options, **{given: tmp_path / "x"}), tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one = certificate.own(tmp_path / "a", host="h", now=NOW)
    other = certificate.own(tmp_path / "b", host="h", now=NOW)

    with pytest.raises(ConfigError, match="belong together"):
        certificate.given(one.certificate_path, other.key_path)


def test_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    made = certificate.own(tmp_path, host="h", now=NOW)
    key = serialization.load_pem_private_key(made.key_pem, password=None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(ConfigError, match="without a password"):
        certificate.given(made.certificate_path, locked)


# Both planes over TLS


def test_right_fingerprint_works_end_to_end(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    taken = bytearray()

    receipt = alice.link.upload(alice.identity(), alice.frame(), before_commit=lambda: None)
    alice.assignment()
    progress = DownloadProgress()
    alice.link.download(alice.identity(), have_digest="", progress=progress, sink=taken.extend)

    assert len(receipt) == 64
    assert taken.startswith(b"ATOL")
    assert progress.offset == len(taken)


def chain(directory: Path, *, names: list[x509.GeneralName] | None) -> Certificate:
    """A certificate that an authority signed, in one file with the authority's own."""
    directory.mkdir(parents=True, exist_ok=True)
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def built(
        name: x509.Name, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType | None
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(root_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=1))
            .not_valid_after(NOW + datetime.timedelta(days=1))
        )
        if extension is not None:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(root_key, hashes.SHA256())

    root = built(root_name, root_key.public_key(), x509.BasicConstraints(True, None))
    leaf_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "train.example.org")])
    extension = None if names is None else x509.SubjectAlternativeName(names)
    leaf = built(leaf_name, key.public_key(), extension)
    pem = serialization.Encoding.PEM
    (directory / "chain.pem").write_bytes(leaf.public_bytes(pem) + root.public_bytes(pem))
    (directory / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate.given(directory / "chain.pem", directory / "key.pem")


@pytest.mark.parametrize(
    "names",
    [
        [x509.DNSName("train.example.org")],
        [x509.DNSName("*.example.org")],
        None,
    ],
    ids=["a name", "a wildcard", "no names"],
)
def test_given_certificate_of_an_authority_can_be_pinned_on_both_planes(
    tmp_path: Path, names: list[x509.GeneralName] | None
) -> None:
    given = chain(tmp_path / "given", names=names)

    with served.serving(tmp_path / "state", host="0.0.0.0", certificate=given) as running:
        alice = running.worker("alice")
        receipt = alice.link.upload(alice.identity(), alice.frame(), before_commit=lambda: None)

    assert len(receipt) == 64


def test_coordinator_serves_on_an_ipv6_address(
    tmp_path: Path, skip: Callable[[str], NoReturn]
) -> None:
    own = certificate.own(tmp_path, host="::1", now=NOW)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as exc:
        reason = f"this machine has no IPv6 loopback: {exc.strerror}"
        if not has_ipv6():
            # Nothing that could be installed: its kernel was built or started without.
            pytest.skip(reason)
        skip(reason)

    with served.serving(tmp_path / "state", host="::1", certificate=own) as running:
        alice = running.worker("alice")
        receipt = alice.link.upload(alice.identity(), alice.frame(), before_commit=lambda: None)

    assert len(receipt) == 64


def test_wrong_token_is_refused_over_tls(coordinator: Served) -> None:
    with pytest.raises(Unauthenticated):
        coordinator.link(token="wrong-token").info()


# Strangers


def test_wrong_fingerprint_is_refused_before_the_token_is_sent(
    coordinator: Served, tmp_path: Path
) -> None:
    assert coordinator.certificate is not None
    with impostor(tmp_path) as stranger:
        link = NetworkLink(
            f"https://127.0.0.1:{stranger.port}",
            token=TOKENS[Role.WORKER],
            fingerprint=coordinator.certificate.fingerprint,
        )

        with pytest.raises(ConfigError, match="somebody else answers there"):
            link.info()

        link.close()
        assert stranger.ended.wait(SOCKET_SECONDS)

    assert stranger.handshakes == [True]
    assert stranger.told == b""


def test_impostor_hears_the_token_of_a_client_that_pins_him(tmp_path: Path) -> None:
    """The control of the test above: this server records what it is told."""
    with impostor(tmp_path) as stranger:
        pinned = pinning.pin("127.0.0.1", stranger.port, stranger.certificate.fingerprint)
        assert stranger.ended.wait(SOCKET_SECONDS)
        stranger.ended.clear()
        plain = socket.create_connection(("127.0.0.1", stranger.port), timeout=SOCKET_SECONDS)
        with pinned.context().wrap_socket(plain) as secured:
            secured.sendall(TOKENS[Role.WORKER].encode())
        assert stranger.ended.wait(SOCKET_SECONDS)

    assert TOKENS[Role.WORKER].encode() in stranger.told


def test_certificate_changed_after_pinning_is_refused_before_the_token_is_sent(
    coordinator: Served, tmp_path: Path
) -> None:
    assert coordinator.certificate is not None
    trust = pinning.pin("127.0.0.1", coordinator.address.port, coordinator.certificate.fingerprint)
    with impostor(tmp_path) as stranger:
        url = f"https://127.0.0.1:{stranger.port}/info"

        with pytest.raises(httpx.ConnectError):
            httpx.get(url, headers={"authorization": "secret"}, verify=trust.context())

        assert stranger.ended.wait(SOCKET_SECONDS)

    assert stranger.told == b""


def test_impostor_on_the_data_port_is_refused_before_the_token_is_sent(
    coordinator: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = coordinator.worker("bob")
    with impostor(tmp_path) as stranger:
        monkeypatch.setattr(coordinator.coordinator, "transfer_port", stranger.port)

        with pytest.raises(CoordinatorUnreachable):
            bob.link.download(
                bob.identity(), have_digest="", progress=DownloadProgress(), sink=lambda _: None
            )

        assert stranger.ended.wait(SOCKET_SECONDS)
        bob.link.close()

    assert TOKENS[Role.WORKER].encode() not in stranger.told
    assert stranger.told == b""


def test_own_certificate_without_a_fingerprint_is_refused_with_the_way_out(
    coordinator: Served,
) -> None:
    with pytest.raises(ConfigError, match="give --fingerprint from the join command"):
        coordinator.link(fingerprint=None).info()


@pytest.mark.parametrize(
    "fingerprint",
    ["", "sha256:", "sha256:" + "0" * 63, "sha1:" + "0" * 64, "sha256:" + "é" * 64, "0" * 64],
)
def test_fingerprint_of_another_form_is_refused(fingerprint: str) -> None:
    with pytest.raises(ConfigError, match="64 hex digits"):
        NetworkLink("https://127.0.0.1:1", token="t", fingerprint=fingerprint)


def test_fingerprint_with_a_plain_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an https:// url"):
        NetworkLink("http://127.0.0.1:1", token="t", fingerprint="sha256:" + "0" * 64)


def test_plain_http_to_a_secured_port_gets_nothing(coordinator: Served) -> None:
    plain = NetworkLink(f"http://127.0.0.1:{coordinator.address.port}", token=TOKENS[Role.WORKER])

    try:
        with pytest.raises(CoordinatorUnreachable):
            plain.info()
    finally:
        plain.close()


def test_plain_grpc_to_a_secured_port_gets_nothing(coordinator: Served) -> None:
    carol = coordinator.worker("carol")
    request = transfer_pb2.DownloadRequest(identity=served.proto_identity(carol.identity()))

    with pytest.raises(CoordinatorUnreachable), carol.link._transfer_errors():
        list(
            coordinator.stub().Download(request, metadata=served.metadata(), timeout=SOCKET_SECONDS)
        )


GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 300, b"\x16\x03\x01\x00\x05hello" * 9)


@pytest.mark.parametrize("data", GARBAGE, ids=["plain HTTP", "zeros", "a torn hello"])
def test_garbage_on_secured_ports_closes_the_connection_and_the_next_one_is_served(
    coordinator: Served, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level(logging.WARNING)
    dan = coordinator.worker(f"dan-{len(data)}")

    for port in (coordinator.address.port, coordinator.address.transfer_port):
        _knock(port, data)
    dan.link.download(
        dan.identity(), have_digest="", progress=DownloadProgress(), sink=lambda _: None
    )

    assert caplog.records == []


def _knock(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS) as connection:
        connection.sendall(data)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass


# The command

JOIN = re.compile(
    r"atoll join https://(?P<host>\S+):(?P<port>\d+) --token (?P<token>\S+)"
    r" --fingerprint (?P<fingerprint>sha256:[0-9a-f]{64})"
)


def test_printed_join_command_opens_the_coordinator(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        printed = JOIN.search(capsys.readouterr().out)
        assert printed is not None
        link = NetworkLink(
            f"https://127.0.0.1:{printed['port']}",
            token=printed["token"],
            fingerprint=printed["fingerprint"],
        )
        info = link.info()
        link.close()

    assert info.name == "served"
    assert printed["host"] == socket.gethostname()


def test_restarted_coordinator_has_the_same_fingerprint_and_tokens(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        first = JOIN.search(capsys.readouterr().out)
    with commanded(options):
        again = capsys.readouterr().out
        assert first is not None
        link = NetworkLink(
            f"https://127.0.0.1:{port_of(options)}",
            token=first["token"],
            fingerprint=first["fingerprint"],
        )
        info = link.info()
        link.close()

    assert info.name == "served"
    assert first["fingerprint"] in again
    assert first["token"] not in again


def test_tokens_are_nowhere_in_the_state_directory(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        out = capsys.readouterr().out
    join, admin = JOIN.search(out), re.search(r"shown once: (\S+)", out)
    assert join is not None
    assert admin is not None
    assert options.directory is not None
    files = [path for path in options.directory.rglob("*") if path.is_file()]

    found = [
        path.name
        for path in files
        if join["token"].encode() in path.read_bytes() or admin[1].encode() in path.read_bytes()
    ]

    assert len(files) >= 4
    assert found == []


def test_loopback_asks_for_a_token_too(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    loopback = with_changes(options, host="127.0.0.1")

    with commanded(loopback):
        token = re.search(r"--token (\S+)", capsys.readouterr().out)
        assert token is not None
        url = f"http://127.0.0.1:{port_of(options)}/info"
        without = httpx.get(url, trust_env=False, verify=False).status_code
        known = {"authorization": f"Bearer {token[1]}"}
        with_token = httpx.get(url, headers=known, trust_env=False, verify=False).status_code

    assert (without, with_token) == (401, 200)


def test_insecure_serves_plain_text_and_says_what_that_means(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(with_changes(options, insecure=True)):
        printed = capsys.readouterr().out
        reply = httpx.get(
            f"http://127.0.0.1:{port_of(options)}/health", trust_env=False, verify=False
        )

    assert reply.status_code == 200
    assert "anybody on the way can read the token" in printed


def test_tokens_from_the_environment_are_used_and_not_printed(
    options: ServeOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_WORKER_TOKEN", TOKENS[Role.WORKER])
    monkeypatch.setenv("ATOLL_ADMIN_TOKEN", TOKENS[Role.ADMIN])

    with commanded(with_changes(options, host="127.0.0.1")):
        printed = capsys.readouterr().out
        link = NetworkLink(f"http://127.0.0.1:{port_of(options)}", token=TOKENS[Role.WORKER])
        info = link.info()
        link.close()

    assert info.name == "served"
    assert not any(token in printed for token in TOKENS.values())


@pytest.mark.parametrize(
    ("worker", "admin", "rule"),
    [
        ("short", "b" * 20, "use 16 or more"),
        ("two words that are long", "b" * 20, "printable ASCII"),
        ("ümlaut-ümlaut-ümlaut", "b" * 20, "printable ASCII"),
        ("a" * 20, "a" * 20, "every worker would be an admin"),
    ],
)
def test_tokens_that_cannot_serve_are_refused(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch, worker: str, admin: str, rule: str
) -> None:
    monkeypatch.setenv("ATOLL_WORKER_TOKEN", worker)
    monkeypatch.setenv("ATOLL_ADMIN_TOKEN", admin)

    with pytest.raises(ConfigError, match=rule):
        command.serve(options, signals=())


def test_port_that_is_taken_is_refused_by_its_number(options: ServeOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            command.serve(with_changes(options, host="127.0.0.1", port=port), signals=())


def test_transfer_port_that_is_taken_is_refused_by_its_number(options: ServeOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = with_changes(options, host="127.0.0.1", transfer_port=port)

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} for transfers"):
            command.serve(asked, signals=())


# A process of its own


@dataclass(frozen=True)
class Ended:
    """A coordinator process that was scanned, joined and told to stop."""

    exit_code: int
    name: str
    log_before: str
    log_after: str
    directory: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp("process")
    run_file = directory / "run.toml"
    run_file.write_text(RUN_FILE)
    tokens = local.Tokens(worker=TOKENS[Role.WORKER], admin=TOKENS[Role.ADMIN])
    process = local.start_coordinator(
        run_file, directory / "state", tokens=tokens, options=["--host", "0.0.0.0"]
    )
    try:
        process.wait_ready()
        ready = json.loads(process.ready_path.read_text())
        port = int(ready["url"].rpartition(":")[2])
        before = process.log_tail(1 << 20)
        for data in GARBAGE * 5:
            _knock(port, data)
            _knock(ready["transfer_port"], data)
        link = NetworkLink(
            f"https://127.0.0.1:{port}", token=tokens.worker, fingerprint=ready["fingerprint"]
        )
        name = link.info().name
        link.close()
        after = process.log_tail(1 << 20)
        process.terminate()
        exit_code = process.wait(timeout_seconds=10.0)
    finally:
        process.kill()
    return Ended(exit_code, name, before, after, directory / "state")


def test_scanned_process_serves_on_and_ends_well(ended: Ended) -> None:
    assert (ended.name, ended.exit_code) == ("served", 0)


def test_scanned_process_writes_no_line_about_it(ended: Ended) -> None:
    assert ended.log_after == ended.log_before


def test_process_with_given_tokens_leaves_them_nowhere_in_its_directory(ended: Ended) -> None:
    files = [path for path in ended.directory.rglob("*") if path.is_file()]

    found = [
        path.name
        for path in files
        if any(token.encode() in path.read_bytes() for token in TOKENS.values())
    ]

    assert "coordinator.log" in {path.name for path in files}
    assert found == []
