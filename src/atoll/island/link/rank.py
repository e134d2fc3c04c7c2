"""What a rank of a sharded run asks of its coordinator beyond messages: ranges and parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.island.link.base import Link, Work
from atoll.protocol.messages import Identity


@dataclass(frozen=True)
class Part:
    """A rank's part of a checkpoint, to be uploaded: its save of the round's last step."""

    group: int
    round: int
    root: str  # what the save is known by
    sha256: str  # of its bytes
    nbytes: int
    read: Callable[[int, int], bytes]  # (offset, nbytes)
    close: Work


class RankLink(Link, Protocol):
    """Errors are those of `Link`: CoordinatorUnreachable means that the call may be repeated."""

    def upload_part(self, identity: Identity, part: Part) -> None:
        """Sends a part of a checkpoint, resuming where an earlier try broke off."""
        ...

    def fetch(self, identity: Identity, sha256: str, *, offset: int, nbytes: int) -> bytes:
        """A range of a blob of the initial weights or of a checkpoint."""
        ...
