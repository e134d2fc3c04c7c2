"""One rank of a torchrun launch: sums go over torch.distributed, reads and questions over gRPC."""

from collections.abc import Iterator

import torch.distributed as dist

from atoll.collectives.mailbox import Bytes
from atoll.collectives.peers import Peers
from atoll.collectives.torch_dist import TorchRanks
from atoll.errors import GroupBroken
from atoll.traffic import Traffic

CLOSE_SECONDS = 1.0  # for what gloo has under way when this rank leaves


class TorchMember(TorchRanks):
    """Fulfils `peers.Peers`; `calls` is this rank in the same group, over another transport.

    After an abort gloo may have something under way until its own deadline: `is_stuck` says so
    after `close`, and such a process can only end.
    """

    def __init__(
        self, group: dist.ProcessGroup, calls: Peers, *, timeout_seconds: float, traffic: Traffic
    ) -> None:
        super().__init__(group, timeout_seconds=timeout_seconds, traffic=traffic)
        self._calls = calls
        self.is_stuck = False

    def read(self, rank: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        return self._calls.read(rank, name, start, stop)

    def ask(self, rank: int, name: str, body: Bytes = b"") -> bytes:
        return self._calls.ask(rank, name, body)

    def advance(self, step: int) -> None:
        self._calls.advance(step)

    def abort(self, error: Exception) -> None:
        super().abort(error)
        self._calls.abort(error)

    def close(self) -> None:
        """Leaves the group: what is under way is given up."""
        super().abort(GroupBroken("this rank has left its group"))
        self.is_stuck = not self.ends_within(CLOSE_SECONDS)
        self._calls.close()
