"""The door of a rank: where others of its group reach it. Opened before it registers, closed last.

Implementations: `grpc_host` between processes, `torch_host` between those of a torchrun launch, and
the simulator's in memory.
"""

from dataclasses import dataclass
from typing import Protocol

from atoll.collectives.peers import Desk, Peers, Pings, Source
from atoll.protocol.manifest import ShardedSettings
from atoll.protocol.sharded import GroupReply, Launch
from atoll.strategies.sharded.quorum.rank import Lane
from atoll.traffic import Traffic


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens, as it tells the coordinator when it registers."""

    ip_address: str | None  # None: where it speaks from
    port: int
    certificate: str  # PEM; empty without TLS


class Host(Protocol):
    """One per process."""

    @property
    def outlives_groups(self) -> bool:
        """Whether this process can be in another group when one is over; else it must end."""
        ...

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def launch(self) -> Launch | None:
        """The torchrun launch that this process is of, where only those make a group."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What went between this process and other ranks, in all its groups."""
        ...

    def measure(self, candidate: GroupReply, rank: int) -> Pings:
        """How far the other members of a candidate group are; lets them measure, too."""
        ...

    def enter(
        self,
        formed: GroupReply,
        rank: int,
        *,
        source: Source,
        desk: Desk | None = None,
        settings: ShardedSettings,
    ) -> Peers:
        """This process as a rank of the group, until the peers are closed."""
        ...

    def lane(self, name: str) -> Lane:
        """What carries words to one other rank in order, beside the training."""
        ...

    def close(self) -> None:
        """Nobody is let in any more."""
        ...
