"""Who belongs to a group, and how a rank shows the others that it does.

With TLS both sides show certificates, and exactly the group's are trusted: who sends is whose
certificate it is. Without, a secret of the group in the metadata stands for it, which keeps
strangers out and mistakes apart, not members who lie about their rank.
"""

import datetime
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from cryptography import x509

from atoll.errors import ConfigError, Forbidden, NotReady, StaleGeneration
from atoll.wire import certificate

COMMON_NAME = "atoll-rank"

SECRET_KEY = "atoll-group-secret"
RANK_KEY = "atoll-rank"
GROUP_KEY = "atoll-group"


@dataclass(frozen=True)
class Identity:
    """A rank's own certificate and key, as PEM."""

    certificate_pem: bytes
    key_pem: bytes

    @classmethod
    def new(cls, *, now: datetime.datetime) -> "Identity":
        """One that nobody has; the certificate's own bytes are what is trusted, at any address.

        A subject of its own: of several trusted certificates the right one is found by it.
        """
        subject = f"{COMMON_NAME}-{secrets.token_hex(8)}"
        return cls(*certificate.made(subject, names=[x509.DNSName(COMMON_NAME)], now=now))


@dataclass(frozen=True)
class Member:
    """A rank as the others know it."""

    worker_id: str
    address: str  # host:port
    certificate_pem: bytes = b""


@dataclass(frozen=True)
class RankGroup:
    """Ordered members that train together, numbered by the generation they were formed in."""

    number: int
    members: tuple[Member, ...]
    secret: str

    def __post_init__(self) -> None:
        names = [member.worker_id for member in self.members]
        shown = [m.certificate_pem for m in self.members if m.certificate_pem]
        if len(set(names)) < len(names) or len(set(shown)) < len(shown):
            raise ConfigError(
                f"members={names} of group {self.number} share a name or a certificate; each rank "
                f"needs its own"
            )
        if len(self.secret) < 32:
            raise ConfigError(
                f"secret of group {self.number} has {len(self.secret)} characters; at least 32 "
                f"keep strangers out"
            )

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def certificates(self) -> bytes:
        """All of them, one after another."""
        return b"".join(member.certificate_pem for member in self.members)

    def metadata(self, rank: int) -> tuple[tuple[str, str], ...]:
        """What a rank shows with every call."""
        shown = ((GROUP_KEY, str(self.number)), (RANK_KEY, str(rank)))
        return (*shown, (SECRET_KEY, self.secret))

    def sender(self, metadata: Mapping[str, str], certificate_pem: bytes | None) -> int:
        """Which rank calls: by its certificate where there is TLS, else by what it shows.

        StaleGeneration for a member of a group that is over, NotReady for one of a group that this
        rank has yet to hear of, Forbidden for anybody else.
        """
        if not hmac.compare_digest(metadata.get(SECRET_KEY, "").encode(), self.secret.encode()):
            told = metadata.get(GROUP_KEY, "")
            number = int(told) if told.isascii() and told.isdigit() and len(told) < 20 else None
            if number is not None and number > self.number:
                raise NotReady(
                    f"group={number} is not begun here, this rank is in {self.number}; call again"
                )
            if number is not None and number < self.number:
                raise StaleGeneration(
                    f"group={number} is over; this rank is in {self.number}", present=self.number
                )
            raise Forbidden(f"the caller does not show the secret of group {self.number}")
        if certificate_pem is not None:
            return self._owner(certificate_pem)
        rank = metadata.get(RANK_KEY, "")
        if not (rank.isascii() and rank.isdigit() and len(rank) < 9 and int(rank) < self.size):
            raise Forbidden(f"rank={rank[:20]!r} of the caller is not one of {self.size}")
        return int(rank)

    def _owner(self, certificate_pem: bytes) -> int:
        for rank, member in enumerate(self.members):
            if member.certificate_pem.strip() == certificate_pem.strip():
                return rank
        raise Forbidden(f"the caller's certificate is not one of group {self.number}")


def channel_credentials(identity: Identity, to: Member) -> grpc.ChannelCredentials:
    """Shows this rank's certificate and takes exactly that of `to`."""
    return grpc.ssl_channel_credentials(
        to.certificate_pem, identity.key_pem, identity.certificate_pem
    )
