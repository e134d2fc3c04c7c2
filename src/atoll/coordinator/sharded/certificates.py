"""Whether a rank's certificate can be trusted by the others, as far as can be known at once."""

from collections.abc import Sequence

from cryptography import x509

from atoll.errors import ProtocolError
from atoll.ledger.records import MemberRecord
from atoll.protocol.messages import RegisterRequest

_BEGIN = "-----BEGIN"


def check(request: RegisterRequest, members: Sequence[MemberRecord]) -> None:
    """ProtocolError unless it is one certificate of its own, or none where the others have none."""
    given, name = request.certificate, request.worker_id
    others = [member for member in members if member.worker_id != name]
    if given:
        _check_one(given, name)
    for member in others:
        if bool(member.certificate) != bool(given):
            has = "has one" if given else "has none"
            raise ProtocolError(
                f"certificate of worker_id={name!r}: it {has}, unlike {member.worker_id!r}; ranks "
                f"trust each other by certificates, or all of them do without TLS"
            )
        if given and member.certificate.strip() == given.strip():
            raise ProtocolError(
                f"certificate of worker_id={name!r} is that of {member.worker_id!r}; each rank "
                f"needs its own"
            )


def _check_one(pem: str, name: str) -> None:
    try:
        x509.load_pem_x509_certificate(pem.encode())
    except ValueError as exc:
        raise ProtocolError(
            f"certificate of worker_id={name!r} is not a certificate in PEM; send that of the "
            f"rank's server"
        ) from exc
    if pem.count(_BEGIN) != 1:
        raise ProtocolError(
            f"certificate of worker_id={name!r} holds {pem.count(_BEGIN)} of them; a rank has one"
        )
