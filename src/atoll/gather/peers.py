"""Who may contribute to a window: names, keys and where each publishes.

A peer names a bucket of the run and a folder in it, never a server: addresses and credentials come
from the run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from atoll import ids
from atoll.blobs import bucket as buckets
from atoll.errors import ConfigError
from atoll.gather.keys import PublicKey

_BUCKET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
MAX_PREFIX = 512  # leaves room for what stands below it


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer: its uid, its key, and the folder `prefix` of the run's bucket `bucket`."""

    uid: str
    key: PublicKey
    bucket: str
    prefix: str

    def __post_init__(self) -> None:
        ids.worker_id(self.uid)
        if not _BUCKET.match(self.bucket):
            raise ConfigError(
                f"peer {self.uid!r} has bucket={self.bucket!r}; it must be the name of one of the "
                f"run's buckets, 1 to 64 characters out of A-Z a-z 0-9 . _ -"
            )
        if not buckets.is_key(self.prefix) or len(self.prefix) > MAX_PREFIX:
            raise ConfigError(
                f"peer {self.uid!r} has prefix={self.prefix[:80]!r}; it must be {buckets.RULE}, "
                f"at most {MAX_PREFIX} characters"
            )

    @classmethod
    def parse(cls, table: Mapping[str, object]) -> Self:
        """The peer in a table of strings, as a run file has it; unknown keys are refused."""
        known = [field.name for field in fields(cls)]
        if sorted(table) != sorted(known) or not all(isinstance(v, str) for v in table.values()):
            raise ConfigError(
                f"peer {dict(table)!r:.200} must have {', '.join(known)}, each a string, and no "
                f"other key"
            )
        told = {name: str(value) for name, value in table.items()}
        return cls(told["uid"], PublicKey.parse(told["key"]), told["bucket"], told["prefix"])


@dataclass(frozen=True, slots=True)
class PeerList:
    """The peers of a window: the primaries, and the reserves in the order in which they step in.

    A uid, and a key, stands once in both lists together: nobody is counted twice.
    """

    primaries: tuple[Peer, ...]
    reserves: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        uids: set[str] = set()
        owners: dict[PublicKey, str] = {}
        for peer in self.all:
            if peer.uid in uids:
                raise ConfigError(
                    f"uid {peer.uid!r} is listed twice; each peer stands once, as a primary or "
                    f"as a reserve"
                )
            if peer.key in owners:
                raise ConfigError(
                    f"key {peer.key.hex} is listed for {owners[peer.key]!r} and {peer.uid!r}; "
                    f"each peer has a key of its own"
                )
            uids.add(peer.uid)
            owners[peer.key] = peer.uid

    @classmethod
    def parse(
        cls, primaries: Sequence[Mapping[str, object]], reserves: Sequence[Mapping[str, object]]
    ) -> Self:
        """The lists in tables, as a run file has them."""
        return cls(tuple(map(Peer.parse, primaries)), tuple(map(Peer.parse, reserves)))

    @property
    def all(self) -> tuple[Peer, ...]:
        """Primaries, then reserves."""
        return self.primaries + self.reserves
