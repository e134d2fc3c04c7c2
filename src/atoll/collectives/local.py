"""Ranks of one process: messages are handed over in memory. For simulation and tests."""

import sys

from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory
from atoll.collectives.base import Label
from atoll.collectives.exchange import CHUNK_BYTES, Exchange, Runner, Way
from atoll.collectives.mailbox import Mailbox


class LocalGroup:
    """What lies between the ranks of one group in one process: everybody's mailbox."""

    def __init__(self, size: int, *, clock: Clock, group: int = 1) -> None:
        self.size = size
        self._clock = clock
        # In memory nothing flows: what waits here would wait at its sender instead.
        self.mailboxes = [
            Mailbox(group=group, rank=rank, size=size, clock=clock, limit_bytes=sys.maxsize)
            for rank in range(size)
        ]

    def rank(
        self,
        rank: int,
        runner: Runner,
        *,
        way: Way = "ring",
        timeout_seconds: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Exchange:
        """The collectives of one rank."""
        return Exchange(
            rank=rank,
            size=self.size,
            port=LocalPort(self, rank),
            mailbox=self.mailboxes[rank],
            runner=runner,
            clock=self._clock,
            way=way,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
        )


class LocalPort:
    """Hands messages to the other ranks' mailboxes at once."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Copies the values, as a network would."""
        self._group.mailboxes[to].deliver(label, self._rank, bytes(memory.bytes_of(values)))

    def flush(self, *, until: float) -> None:
        """Nothing needs its memory any more: it was copied."""
