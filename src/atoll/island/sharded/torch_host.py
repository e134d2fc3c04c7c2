"""A rank's door in a torchrun launch: gloo between its processes, and beside it a gRPC server."""

import torch.distributed as dist

from atoll.collectives.peers import Desk, Peers, Pings, Source
from atoll.collectives.torch_dist import gloo_group
from atoll.collectives.torch_member import TorchMember
from atoll.errors import GroupBroken, ProtocolError
from atoll.island.ranks.torch_group import TorchGroup
from atoll.island.sharded.host import Endpoint, Host
from atoll.protocol.manifest import ShardedSettings
from atoll.protocol.sharded import GroupReply, Launch
from atoll.strategies.sharded.quorum.rank import Lane
from atoll.traffic import Traffic


class TorchHost:
    """Fulfils `host.Host`: sums over torch.distributed, all else over the host `beside` it.

    Collective: all processes of the launch make theirs at once, before they register.
    `deadline_seconds` is that of every sum. One group of ranks can be entered: after an error gloo
    has lost its place in the order of exchanges, and cannot be connected again in this process.
    """

    outlives_groups = False

    def __init__(
        self, beside: Host, island: TorchGroup, launch_id: str, *, deadline_seconds: float
    ) -> None:
        self.launch = Launch(id=launch_id, rank=island.rank, size=island.size)
        self._beside = beside
        self._island = island
        self._deadline = deadline_seconds
        with island.training():
            self._gloo: dist.ProcessGroup = gloo_group(timeout_seconds=deadline_seconds)
        self._member: TorchMember | None = None

    @property
    def endpoint(self) -> Endpoint:
        return self._beside.endpoint

    @property
    def traffic(self) -> Traffic:
        return self._beside.traffic

    def measure(self, candidate: GroupReply, rank: int) -> Pings:
        return self._beside.measure(candidate, rank)

    def enter(
        self,
        formed: GroupReply,
        rank: int,
        *,
        source: Source,
        desk: Desk | None = None,
        settings: ShardedSettings,
    ) -> Peers:
        """ProtocolError for a group that is not this launch, GroupBroken for a second one."""
        told, mine = (rank, len(formed.members)), (self.launch.rank, self.launch.size)
        if told != mine:
            raise ProtocolError(
                f"group={formed.group} makes this process rank {told[0]} of {told[1]}, and "
                f"torchrun made it {mine[0]} of {mine[1]}; a group is all processes of one launch, "
                f"so run the same release of atoll on both sides"
            )
        if self._member is not None:
            raise GroupBroken(
                f"group={formed.group} comes after another one of this process, which "
                f"torch.distributed connects once; end it, and torchrun starts all of them again"
            )
        calls = self._beside.enter(formed, rank, source=source, desk=desk, settings=settings)
        self._member = TorchMember(
            self._gloo, calls, timeout_seconds=self._deadline, traffic=self.traffic
        )
        return self._member

    def lane(self, name: str) -> Lane:
        return self._beside.lane(name)

    def close(self) -> None:
        self._beside.close()
        if self._member is not None and self._member.is_stuck:
            self._island.abandon()
