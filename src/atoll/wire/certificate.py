"""The coordinator's own certificate: made once, kept in the state directory, pinned by islands."""

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll import files as filesystem
from atoll.errors import ConfigError

COMMON_NAME = "atoll-coordinator"  # islands check the pinned bytes, so any address may serve it
LIFETIME_DAYS = 3650


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM, with the files they are in."""

    certificate_path: Path
    key_path: Path

    @property
    def pem(self) -> bytes:
        return self.certificate_path.read_bytes()

    @property
    def key_pem(self) -> bytes:
        return self.key_path.read_bytes()

    @property
    def fingerprint(self) -> str:
        """`sha256:` and the hex digest of the certificate's DER bytes; of a chain, the first."""
        leaf = x509.load_pem_x509_certificates(self.pem)[0]
        der = leaf.public_bytes(serialization.Encoding.DER)
        return f"sha256:{hashlib.sha256(der).hexdigest()}"


def given(certificate_path: Path, key_path: Path) -> Certificate:
    """A certificate from two files; refuses unreadable or mismatched ones by name."""
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_path, key_path, password="")
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(
            f"cannot use certificate {str(certificate_path)!r} with key {str(key_path)!r}: {exc}; "
            f"give two PEM files that belong together, the key without a password"
        ) from exc
    return Certificate(certificate_path, key_path)


def own(directory: Path, *, host: str, now: datetime.datetime) -> Certificate:
    """The certificate kept in `directory`, made when there is none."""
    kept = Certificate(directory / "certificate.pem", directory / "certificate.key")
    if kept.certificate_path.exists() and kept.key_path.exists():
        return given(kept.certificate_path, kept.key_path)
    public, secret = made(COMMON_NAME, names=_names(host), now=now)
    # Durable: islands pin it, and one that a power cut takes away would lock all of them out.
    for path, data in ((kept.key_path, secret), (kept.certificate_path, public)):
        filesystem.write_whole(path, data)
    return kept


def made(
    common_name: str, *, names: Sequence[x509.GeneralName], now: datetime.datetime
) -> tuple[bytes, bytes]:
    """A new certificate that vouches for itself, and its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=LIFETIME_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(pem, form, serialization.NoEncryption())
    return built.public_bytes(pem), secret


def _names(host: str) -> list[x509.GeneralName]:
    own: x509.GeneralName
    try:
        own = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        own = x509.DNSName(host)
    return [x509.DNSName(COMMON_NAME), x509.DNSName("localhost"), own]
