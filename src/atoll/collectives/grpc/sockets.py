"""Sockets between ranks: how they are secured, read whole and ended, on both sides.

A socket is opened with a key that a gRPC call handed out. Then messages go one way and answers the
other: a zero byte for each message that lies in the mailbox, or, once, why there will be no more:

    01 | u16 bytes | JSON {code, message, retry, generation}
"""

import contextlib
import json
import socket
import ssl
import struct
import tempfile
from typing import Any

from atoll.collectives.grpc.trust import Identity
from atoll.errors import AtollError, CoordinatorUnreachable, ProtocolError, StaleGeneration
from atoll.wire import statuses

KEY_BYTES = 32
TAKEN = b"\0"
REFUSED = b"\1"
_LENGTH = struct.Struct("<H")
MAX_REFUSAL_BYTES = 8 << 10
DRAIN_SECONDS = 2.0
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def prepared(connection: socket.socket) -> None:
    """Answers go out at once, and a peer that has vanished is noticed while nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def secured(
    connection: socket.socket, identity: Identity, trusted_pem: bytes, *, is_server: bool
) -> ssl.SSLSocket:
    """The same connection with TLS: both show a certificate of `trusted_pem` in the handshake,
    which is the caller's to begin.
    """
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the bytes are pinned, so the name adds nothing
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=trusted_pem.decode())
    if is_server:
        context.num_tickets = 0  # one would come as something to read that holds no answer
    with tempfile.NamedTemporaryFile("wb") as file:  # ssl reads keys from files alone
        file.write(identity.key_pem + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context.wrap_socket(connection, server_side=is_server, do_handshake_on_connect=False)


def shows(connection: socket.socket, certificate_pem: bytes) -> bool:
    """Whether the peer's certificate is exactly this one."""
    assert isinstance(connection, ssl.SSLSocket), connection
    shown = connection.getpeercert(binary_form=True)
    return shown == ssl.PEM_cert_to_DER_cert(certificate_pem.decode())


def cut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Ends a connection under whoever reads from it or writes to it, in another thread.

    Not by `SSLSocket.shutdown`, after which what is left would be read as if it had no TLS.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)


def fill(connection: socket.socket, place: memoryview) -> bool:
    """Reads until `place` is full; False when the connection ends before."""
    got = 0
    plain = not isinstance(connection, ssl.SSLSocket)
    flags = socket.MSG_WAITALL if plain else 0
    while got < len(place):
        read = connection.recv_into(place[got:], 0, flags)
        if not read:
            return False
        got += read
    return True


def send(connection: socket.socket, header: bytes, data: memoryview) -> None:
    """Writes both; without TLS in one call, for a header alone would wake the reader twice."""
    if isinstance(connection, ssl.SSLSocket):
        connection.sendall(header)
        connection.sendall(data)
        return
    sent = connection.sendmsg([header, data]) - len(header)
    if sent < 0:
        connection.sendall(header[sent:])
    if sent < len(data):
        connection.sendall(data[max(0, sent) :])


def drain(connection: socket.socket) -> None:
    """Takes what still comes until the peer ends: an end with something unread would lose it what
    was last said. The caller cuts it off after a while: a peer may never end.
    """
    cut(connection, socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass


def refusal(error: AtollError) -> bytes:
    """Why there will be no more answers."""
    said: dict[str, Any] = {
        "code": error.code,
        "message": statuses.sentence(error),
        "retry": error.retry,
        "generation": error.present if isinstance(error, StaleGeneration) else 0,
    }
    written = json.dumps(said).encode()
    return REFUSED + _LENGTH.pack(len(written)) + written


def refused(connection: socket.socket, begun: bytes) -> AtollError:
    """The error that a peer refuses with; `begun` is what was read behind the REFUSED byte."""
    said = begun
    while len(said) < _LENGTH.size or len(said) < _LENGTH.size + _LENGTH.unpack_from(said)[0]:
        more = connection.recv(MAX_REFUSAL_BYTES)
        if not more or len(said) > MAX_REFUSAL_BYTES:
            return CoordinatorUnreachable("a peer broke off while it refused")
        said += more
    try:
        told = json.loads(said[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(said)[0]])
        return statuses.reported(
            str(told["code"]),
            str(told["message"]),
            retry=bool(told["retry"]),
            generation=int(told["generation"]),
        )
    except (ValueError, KeyError, TypeError) as exc:
        return ProtocolError(f"a peer refuses in words that no rank writes: {exc}")
