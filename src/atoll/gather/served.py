"""Payloads of a result that is applied: those of this rank, and all, read by all ranks together."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atoll.collectives.base import Collectives
from atoll.errors import StoreError
from atoll.gather.state_dict import SliceSource
from atoll.gather.turns import Turns
from atoll.gather.vote import on_all

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class OwnSlices:
    """What one rank has; fulfils `SliceSource`, and says who has the rest."""

    source: SliceSource
    holders: Mapping[str, int]  # the rank that fetched each uid's payload
    rank: int

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload; StoreError for one that another rank fetched."""
        if self.holders[uid] != self.rank:
            raise StoreError(
                f"the payload of {uid!r} lies in the spool of rank {self.holders[uid]}, not of "
                f"rank {self.rank}; read `shared_state_dict` on all ranks together, or there"
            )
        return self.source.read(uid, start, stop)


@dataclass(frozen=True, eq=False)
class SharedSlices:
    """What all ranks have together; fulfils `SliceSource`. Every read is a collective.

    All ranks read the same in the same order, and what one of them meets is raised on each. A rank
    that reads alone gets MissingRanks at the deadline.
    """

    own: OwnSlices
    ranks: Collectives
    turns: Turns  # the window's, which all ranks have left at the same count

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload, on every rank."""
        holder, size = self.own.holders[uid], self.ranks.size
        if size == 1:
            return self.own.read(uid, start, stop)
        is_holder = self.ranks.rank == holder

        def read() -> bytes:
            return self.own.read(uid, start, stop) if is_holder else b""

        data = bytearray(on_all(self.ranks, self.turns, read))
        sent = torch.frombuffer(data, dtype=torch.uint8) if data else _NOTHING
        sizes = [stop - start if rank == holder else 0 for rank in range(size)]
        came = self.ranks.exchange(self.turns.next("gather"), [sent] * size, sizes)
        return came[holder].numpy().tobytes()
