"""One process group of gloo, as calls that wait, and the process groups of its sub-groups.

These are made here and not by `dist.new_group`, which every process of a launch must call, also
those that are in no part of it, and which sorts ranks; `split_group` of torch 2.13 connects
unreliably on gloo.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store


class Wire:
    """Ranks are those of the process group; what goes wrong is gloo's RuntimeError."""

    def __init__(self, group: dist.ProcessGroup | dist.ProcessGroupGloo, store: Store) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._store = store
        self._group: Any = group  # both have the same calls, which one's stub lacks

    def all_gather(self, rows: list[Tensor], own: Tensor) -> None:
        """`rows[k]` becomes what rank k gives."""
        self._group.allgather([rows], [own]).wait()

    def all_to_all(
        self, came: Tensor, room: Tensor, coming: Sequence[int], leaving: Sequence[int]
    ) -> None:
        """Both are one piece for each rank, one after another, of these lengths."""
        self._group.alltoall_base(came, room, list(coming), list(leaving)).wait()

    def broadcast(self, message: Tensor, source: int) -> None:
        """`message` becomes that of rank `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([message], options).wait()

    def all_reduce(self, values: Tensor) -> None:
        """Adds in an order of its own."""
        self._group.allreduce([values]).wait()

    def send(self, message: Tensor, to: int) -> None:
        """Waits until the other receives."""
        self._group.send([message], to, 0).wait()

    def receive(self, message: Tensor, source: int) -> None:
        """As long as what was sent."""
        self._group.recv([message], source, 0).wait()

    def part(self, name: str, ranks: Sequence[int], *, timeout_seconds: float) -> "Wire":
        """A process group of these ranks, in this order; each of them calls it."""
        store = PrefixStore(name, self._store)
        deadline = timedelta(seconds=timeout_seconds)  # the group's is not inherited
        own = ranks.index(self.rank)
        return Wire(dist.ProcessGroupGloo(store, own, len(ranks), deadline), store)


def of_group(group: dist.ProcessGroup) -> Wire:
    """Of a process group that torch knows."""
    return Wire(group, group.get_group_store())
