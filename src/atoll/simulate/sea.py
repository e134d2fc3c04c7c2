"""What lies between simulated ranks: groups in memory, at the latencies of a matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.clock import Clock
from atoll.collectives.local import LocalGroup, LocalMember
from atoll.collectives.peers import Desk, Pings, Source
from atoll.collectives.runners import Inline
from atoll.island.sharded.host import Endpoint
from atoll.protocol.manifest import ShardedSettings
from atoll.protocol.sharded import GroupReply, Launch
from atoll.traffic import Traffic

FIRST_PORT = 20_000
ADDRESS = "127.0.0.1"


class Sea:
    """The groups of one simulated run, each made when its first rank enters it.

    `latencies[a][b]`, in seconds, is the way from worker a to worker b, both by their names; who
    is not in it is near everybody.
    """

    def __init__(
        self, clock: Clock, *, latencies: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self.clock = clock
        self._latencies = latencies or {}
        self._groups: dict[tuple[int, str], LocalGroup] = {}
        self._hosts = 0

    def host(self, launch: Launch | None = None) -> "SeaHost":
        """The door of one more rank, which is of a launch where only those make a group."""
        self._hosts += 1
        return SeaHost(self, Endpoint(ADDRESS, FIRST_PORT + self._hosts, ""), launch)

    def group(self, told: GroupReply) -> LocalGroup:
        """The group that the coordinator told of; a candidate is another one than what it forms."""
        key = told.group, told.secret
        if key not in self._groups:
            names = [member.worker_id for member in told.members]
            self._groups[key] = LocalGroup(
                len(names), clock=self.clock, group=told.group, latency=self._matrix(names)
            )
        return self._groups[key]

    def _matrix(self, names: Sequence[str]) -> list[list[float]]:
        return [[self._latencies.get(a, {}).get(b, 0.0) for b in names] for a in names]


@dataclass
class SeaHost:
    """Fulfils `host.Host` in memory."""

    sea: Sea
    endpoint: Endpoint
    launch: Launch | None = None
    traffic: Traffic = field(default_factory=Traffic)
    outlives_groups: bool = True  # memory is never broken

    def measure(self, candidate: GroupReply, rank: int) -> Pings:
        return self.sea.group(candidate).pings(rank)

    def enter(
        self,
        formed: GroupReply,
        rank: int,
        *,
        source: Source,
        desk: Desk | None = None,
        settings: ShardedSettings,
    ) -> LocalMember:
        return self.sea.group(formed).rank(
            rank,
            Inline(),
            way=settings.exchange,
            timeout_seconds=settings.deadline_seconds,
            source=source,
            desk=desk,
            traffic=self.traffic,
        )

    def lane(self, name: str) -> Inline:  # noqa: ARG002  # a fiber carries it itself
        return Inline()

    def close(self) -> None:
        """Nothing is open."""
