"""Trust by fingerprint: the coordinator's certificate is the one the join command names."""

import hashlib
import hmac
import re
import socket
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.x509.oid import NameOID

from atoll.errors import ConfigError, CoordinatorUnreachable

CONNECT_SECONDS = 10.0
_FINGERPRINT = re.compile(r"sha256:([0-9a-fA-F]{64})\Z")


@dataclass(frozen=True)
class Trust:
    """Which certificate the island accepts."""

    pem: bytes | None  # None: the machine's own authorities
    name: str | None = None  # what the pinned certificate calls its owner

    def context(self) -> ssl.SSLContext:
        """For HTTPS: only the pinned certificate, under whatever address."""
        if self.pem is None:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the bytes are pinned, so the name adds nothing
        # The pinned certificate is trusted itself, whether or not an authority signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=self.pem.decode())
        return context


def checked(fingerprint: str) -> str:
    """The hex digits of `fingerprint`, or a ConfigError that states its form."""
    match = _FINGERPRINT.match(fingerprint)
    if match is None:
        raise ConfigError(
            f"fingerprint={fingerprint!r} must be 'sha256:' and 64 hex digits; "
            f"copy it from the join command that `atoll serve` printed"
        )
    return match[1].lower()


def pin(host: str, port: int, fingerprint: str | None) -> Trust:
    """Fetches the certificate and compares it with the fingerprint, in constant time.

    Nothing but a TLS handshake is sent: a stranger at that address learns no token. Without a
    fingerprint the machine's own authorities decide.
    """
    if fingerprint is None:
        return Trust(None)
    expected = checked(fingerprint)
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
    if not hmac.compare_digest(found, expected):
        raise ConfigError(
            f"the certificate of {host}:{port} has fingerprint sha256:{found}, the join command "
            f"says {fingerprint}; somebody else answers there, or the coordinator has a new one"
        )
    return Trust(ssl.DER_cert_to_PEM_cert(der).encode(), _name(der))


def _name(der: bytes) -> str | None:
    """A name in the certificate, for gRPC to compare with: it always checks one."""
    certificate = x509.load_der_x509_certificate(der)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [*names.get_values_for_type(x509.DNSName)]
        found += map(str, names.get_values_for_type(x509.IPAddress))
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        found = [str(attribute.value) for attribute in common]
    return found[0].replace("*", "coordinator") if found else None
