"""Trust by fingerprint: the coordinator's certificate is the one the join command names."""

import hashlib
import hmac
import socket
import ssl
from dataclasses import dataclass

from atoll.errors import ConfigError, CoordinatorUnreachable

CONNECT_SECONDS = 10.0
SERVER_NAME = "atoll-coordinator"  # what the coordinator's own certificate calls itself


@dataclass(frozen=True)
class Trust:
    """Which certificate the island accepts."""

    pem: bytes | None  # None: the machine's own authorities

    def context(self) -> ssl.SSLContext:
        """For HTTPS: only the pinned certificate, under whatever address."""
        if self.pem is None:
            return ssl.create_default_context()
        context = ssl.create_default_context(cadata=self.pem.decode())
        context.check_hostname = False  # the bytes are pinned, so the name adds nothing
        return context


def pin(host: str, port: int, fingerprint: str) -> Trust:
    """Fetches the certificate and compares it with the fingerprint, in constant time."""
    kind, _, expected = fingerprint.partition(":")
    if kind != "sha256" or len(expected) != 64:
        raise ConfigError(
            f"fingerprint={fingerprint!r} must be 'sha256:' and 64 hex digits; "
            f"copy it from the join command that `atoll serve` printed"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the comparison below is the verification
    try:
        with (
            socket.create_connection((host, port), timeout=CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            der = secured.getpeercert(binary_form=True) or b""
    except OSError as exc:
        raise CoordinatorUnreachable(f"no TLS answer from {host}:{port}: {exc}") from exc
    found = hashlib.sha256(der).hexdigest()
    if not hmac.compare_digest(found, expected.lower()):
        raise ConfigError(
            f"the certificate of {host}:{port} has fingerprint sha256:{found}, the join command "
            f"says {fingerprint}; somebody else answers there, or the coordinator has a new one"
        )
    return Trust(ssl.DER_cert_to_PEM_cert(der).encode())
