"""Both planes over TLS: who pins the certificate, and what strangers learn."""

import datetime
import hashlib
import logging
import socket
import ssl
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

from atoll.coordinator.planes.access import Role
from atoll.errors import ConfigError, CoordinatorUnreachable, Unauthenticated
from atoll.island.link.base import Download, DownloadProgress
from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import InfoRequest
from atoll.wire import certificate, pinning
from atoll.wire.certificate import Certificate
from atoll.wire.proto import transfer_pb2
from tests import served
from tests.served import SOCKET_SECONDS, TOKENS, Served

NOW = datetime.datetime.now(datetime.UTC)


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


# Both planes over TLS


def test_fingerprint_is_the_one_that_a_client_sees(coordinator: Served) -> None:
    assert coordinator.certificate is not None

    pem = ssl.get_server_certificate(("127.0.0.1", coordinator.address.port))

    der = ssl.PEM_cert_to_DER_cert(pem)
    assert coordinator.certificate.fingerprint == f"sha256:{hashlib.sha256(der).hexdigest()}"


def test_right_fingerprint_works_end_to_end(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    taken = bytearray()

    receipt = alice.link.upload(alice.identity(), alice.frame(), before_commit=lambda: None)
    alice.assignment()
    progress = DownloadProgress()
    alice.link.download(Download(alice.identity(), 0, "", progress, taken.extend))

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
        coordinator.link(token="wrong-token").send(InfoRequest())


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
            link.send(InfoRequest())

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
            bob.link.download(Download(bob.identity(), 0, "", DownloadProgress(), lambda _: None))

        assert stranger.ended.wait(SOCKET_SECONDS)
        bob.link.close()

    assert TOKENS[Role.WORKER].encode() not in stranger.told
    assert stranger.told == b""


def test_own_certificate_without_a_fingerprint_is_refused_with_the_way_out(
    coordinator: Served,
) -> None:
    with pytest.raises(ConfigError, match="give --fingerprint from the join command"):
        coordinator.link(fingerprint=None).send(InfoRequest())


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
            plain.send(InfoRequest())
    finally:
        plain.close()


def test_plain_grpc_to_a_secured_port_gets_nothing(coordinator: Served) -> None:
    carol = coordinator.worker("carol")
    request = transfer_pb2.DownloadRequest(identity=served.proto_identity(carol.identity()))

    with pytest.raises(CoordinatorUnreachable), served.typed_errors():
        list(
            coordinator.stub().Download(request, metadata=served.metadata(), timeout=SOCKET_SECONDS)
        )


@pytest.mark.parametrize("data", served.SCANS, ids=["plain HTTP", "zeros", "a torn hello"])
def test_garbage_on_secured_ports_closes_the_connection_and_the_next_one_is_served(
    coordinator: Served, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level(logging.WARNING)
    dan = coordinator.worker(f"dan-{len(data)}")

    for port in (coordinator.address.port, coordinator.address.transfer_port):
        served.knock(port, data)
    dan.link.download(Download(dan.identity(), 0, "", DownloadProgress(), lambda _: None))

    assert caplog.records == []
