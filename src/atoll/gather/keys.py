"""A peer's Ed25519 key: made once, kept in a file for its owner alone; it signs statements.

A public key is read strictly. Under a key of small order almost any signature holds for any
message, and a second spelling would let one key stand twice in a list.
"""

import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll import files as filesystem
from atoll.errors import ConfigError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_HEX = re.compile(r"[0-9a-f]{64}\Z")

# The curve of RFC 8032: -x² + y² = 1 + d·x²·y² over the integers modulo _P.
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
# y of the points whose order divides 8: (0, 1), (0, -1), (±√-1, 0) and the four of order 8.
_OF_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset({0, 1, _P - 1, _OF_ORDER_8, _P - _OF_ORDER_8})


@dataclass(frozen=True, slots=True)
class PublicKey:
    """What everybody knows of a key; equal keys have equal bytes."""

    data: bytes

    def __post_init__(self) -> None:
        """ConfigError unless it is the one spelling of a point that only its owner signs for."""
        if len(self.data) != KEY_BYTES:
            raise ConfigError(f"a public key has {KEY_BYTES} bytes, this one {len(self.data)}")
        y = int.from_bytes(self.data, "little") % 2**255  # above it stands the sign of x
        # Before the spelling: some points of small order are other spellings too.
        if y % _P in _SMALL_ORDER:
            raise self._refused("is a point of small order, under which anybody can sign")
        if y >= _P:
            raise self._refused("is not the shortest spelling of its point")
        if not _is_on_curve(y):
            raise self._refused("is no point of the curve")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key spelled by 64 lower-case hex digits, or a ConfigError with the rule."""
        if not isinstance(text, str) or not _HEX.match(text):
            raise ConfigError(
                f"public key {str(text)[:80]!r} must be 64 lower-case hex digits; "
                f"copy it from what `atoll gather keygen` printed"
            )
        return cls(bytes.fromhex(text))

    @property
    def hex(self) -> str:
        return self.data.hex()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether the owner of this key signed exactly `message`."""
        try:
            Ed25519PublicKey.from_public_bytes(self.data).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"public key {self.data.hex()} {why}; take one that `atoll gather keygen` made"
        )


@dataclass(frozen=True, slots=True)
class SecretKey:
    """What signs, known to its peer alone; never shown."""

    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != KEY_BYTES:
            raise ConfigError(f"a signing key has {KEY_BYTES} bytes, this one {len(self.seed)}")

    @classmethod
    def make(cls, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> Self:
        """A new key."""
        return cls(random_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key that `save` put at `path`; ConfigError when others may read it too."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(2 * KEY_BYTES + 2).decode("ascii", "replace").removesuffix("\n")
        except OSError as exc:
            raise ConfigError(
                f"cannot read the signing key {str(path)!r}: {exc.strerror or exc}; "
                f"make one with `atoll gather keygen`"
            ) from exc
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"the signing key {str(path)!r} has mode {stat.S_IMODE(mode):04o}, so others can "
                f"sign with it; make a new one, or chmod it to 0600 if nobody else has read it"
            )
        if not _HEX.match(text):
            raise ConfigError(
                f"{str(path)!r} is no signing key: it must hold 64 lower-case hex digits; "
                f"restore it from a copy or make one with `atoll gather keygen`"
            )
        return cls(bytes.fromhex(text))

    def save(self, path: Path) -> None:
        """Puts the key at `path`, durably, with mode 0600; a file that is there is never replaced.

        A key that is gone cannot be made again, and its peer would be nobody the run knows.
        """
        if not filesystem.create_whole(path, self.seed.hex().encode() + b"\n"):
            raise ConfigError(
                f"{str(path)!r} exists and may be the only copy of a signing key; "
                f"choose another path, or move it away first"
            )

    @property
    def public(self) -> PublicKey:
        secret = Ed25519PrivateKey.from_private_bytes(self.seed)
        return PublicKey(secret.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """The one signature of `message` under this key."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)


def _is_on_curve(y: int) -> bool:
    """Whether x² = (y² - 1) / (d·y² + 1) has a root."""
    numerator, denominator = (y * y - 1) % _P, (_D * y * y + 1) % _P
    square = numerator * pow(denominator, -1, _P) % _P
    return square == 0 or pow(square, (_P - 1) // 2, _P) == 1
