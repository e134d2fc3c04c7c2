"""Bearer tokens and their two roles; only hashes are kept."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from enum import StrEnum

from atoll.errors import AuthError, Forbidden, Unauthenticated


class Role(StrEnum):
    """What a token may do; an admin may do what a worker may."""

    WORKER = "worker"
    ADMIN = "admin"


def token_hash(token: str) -> str:
    """What is stored of a token: 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def only(authorizations: Sequence[str]) -> str | None:
    """The one `Authorization` value of a request; of two, others on the way may take either."""
    if len(authorizations) > 1:
        raise Unauthenticated(
            f"`authorization` stands {len(authorizations)} times in the request; send it once"
        )
    return authorizations[0] if authorizations else None


class Access:
    """Decides which role a request has; never changes, so any thread may ask."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {Role(role): value.encode() for role, value in hashes.items()}

    def is_admin(self, authorization: str | None) -> bool:
        """Whether an `Authorization` value may do what admins may."""
        try:
            self.require(authorization, Role.ADMIN)
        except AuthError:
            return False
        return True

    def require(self, authorization: str | None, role: Role = Role.WORKER) -> None:
        """Refuses an `Authorization` value unless it may do what `role` may; in constant time."""
        scheme, _, token = (authorization or "").partition(" ")
        hashed = token_hash(token).encode()
        found = [role for role, known in self._hashes.items() if hmac.compare_digest(known, hashed)]
        if scheme.lower() != "bearer" or not token or not found:
            raise Unauthenticated()
        if role not in found and Role.ADMIN not in found:
            raise Forbidden(
                f"this call needs the {role.value!r} role, the token has {found[0].value!r}; "
                f"use the admin token that `atoll serve` printed"
            )
