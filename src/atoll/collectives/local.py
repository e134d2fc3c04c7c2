"""Ranks of one process: messages go from mailbox to mailbox, at the group's latencies.

Waits by its clock, so that it serves threads and fibers alike. In memory nothing flows and nothing
is refused; a rank that has left is as silent as a dead one.
"""

import sys
from collections.abc import Iterator, Sequence

from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory, peers, schedule
from atoll.collectives.base import Label
from atoll.collectives.exchange import CHUNK_BYTES, Exchange, Runner, Way
from atoll.collectives.mailbox import Bytes, Mailbox
from atoll.collectives.peers import CountedDesk, CountedSource, Desk, Pings, Source
from atoll.errors import ConfigError, GroupBroken, NotReady
from atoll.traffic import Traffic


class LocalGroup:
    """What lies between the ranks of one group in one process: everybody's mailbox.

    `latency[a][b]`, in seconds, is how long a message from rank a to rank b is under way.
    """

    def __init__(
        self,
        size: int,
        *,
        clock: Clock,
        group: int = 1,
        latency: Sequence[Sequence[float]] | None = None,
    ) -> None:
        if latency is not None and [len(row) for row in latency] != [size] * size:
            raise ConfigError(
                f"latency has {len(latency)} rows of {[len(row) for row in latency]} entries; "
                f"{size} ranks need {size} rows of {size}"
            )
        self.size = size
        self.clock = clock
        self.sources: dict[int, Source] = {}  # of the ranks that let others read
        self.desks: dict[int, Desk] = {}  # of the ranks that let others ask
        self.left: set[int] = set()
        self._latency = latency
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
        source: Source | None = None,
        desk: Desk | None = None,
        way: Way = "ring",
        timeout_seconds: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
        traffic: Traffic | None = None,
    ) -> "LocalMember":
        """One rank, which lets the others read from `source` and ask at `desk`."""
        return LocalMember(
            self,
            rank,
            runner,
            source=source,
            desk=desk,
            way=way,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
            traffic=traffic,
        )

    def seconds(self, sender: int, to: int) -> float:
        """How long a message is under way."""
        return 0.0 if self._latency is None else self._latency[sender][to]

    def there_and_back(self, rank: int, to: int) -> float:
        """How long a question and its answer are."""
        return self.seconds(rank, to) + self.seconds(to, rank)

    def pings(self, rank: int) -> Pings:
        """What `rank` measures; takes as long as the slowest, all being asked at once."""
        others = schedule.others(rank, self.size)
        reached = [to for to in others if to not in self.left]
        taken = {to: self.there_and_back(rank, to) for to in reached}
        self.clock.sleep(max(taken.values(), default=0.0))
        found = {to: seconds * 1000.0 for to, seconds in taken.items()}
        return Pings(found, tuple(sorted(self.left.intersection(others))))


class LocalMember(Exchange):
    """Fulfils `peers.Peers` for one rank of a local group."""

    def __init__(
        self,
        group: LocalGroup,
        rank: int,
        runner: Runner,
        *,
        source: Source | None,
        desk: Desk | None,
        way: Way,
        timeout_seconds: float,
        chunk_bytes: int,
        traffic: Traffic | None,
    ) -> None:
        super().__init__(
            rank=rank,
            size=group.size,
            port=LocalPort(group, rank),
            mailbox=group.mailboxes[rank],
            runner=runner,
            clock=group.clock,
            way=way,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
            traffic=traffic,
        )
        self._group = group
        self._read_seconds = timeout_seconds
        if source is not None:
            group.sources[rank] = CountedSource(source, self.traffic)
        if desk is not None:
            group.desks[rank] = CountedDesk(desk, self.traffic)

    def read(self, rank: int, name: str, start: int, stop: int) -> Iterator[bytes]:
        def opened(start: int, until: float) -> Iterator[bytes]:
            group = self._group
            group.mailboxes[self.rank].check_open()
            group.clock.sleep(min(group.there_and_back(self.rank, rank), until - group.clock.now()))
            source = group.sources.get(rank)
            if source is None:
                raise NotReady(f"rank {rank} is not in the group yet, or no more; call again")
            for piece in source.read(name, start, stop):
                group.mailboxes[self.rank].check_open()
                yield piece

        return peers.resumed(
            opened,
            start,
            stop,
            rank=rank,
            clock=self._group.clock,
            timeout_seconds=self._read_seconds,
            traffic=self.traffic,
        )

    def ask(self, rank: int, name: str, body: Bytes = b"") -> bytes:
        peers.check_ask(body)

        def opened(until: float) -> bytes:
            group = self._group
            group.mailboxes[self.rank].check_open()
            self._travel(self.rank, rank, until)
            if rank not in group.desks:
                raise NotReady(f"rank {rank} is not in the group yet, or no more; call again")
            answer = group.desks[rank].answer(self.rank, name, body)
            self._travel(rank, self.rank, until)
            group.mailboxes[self.rank].check_open()
            return answer

        found = peers.answered(
            opened, rank=rank, clock=self._group.clock, timeout_seconds=self._read_seconds
        )
        self.traffic.sends(len(body))
        self.traffic.receives(len(found))
        return found

    def _travel(self, sender: int, to: int, until: float) -> None:
        seconds = min(self._group.seconds(sender, to), until - self._group.clock.now())
        if seconds > 0:
            self._group.clock.sleep(seconds)

    def advance(self, step: int) -> None:
        self._group.mailboxes[self.rank].advance(step)

    def close(self) -> None:
        """Leaves the group: what is under way is given up, and what comes is dropped."""
        self._group.left.add(self.rank)
        self._group.sources.pop(self.rank, None)
        self._group.desks.pop(self.rank, None)
        self.abort(GroupBroken("this rank has left its group"))


class LocalPort:
    """Hands messages to the other ranks' mailboxes at once; they are read when they are due."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Copies the values, as a network would."""
        if to in self._group.left:
            return
        seconds = self._group.seconds(self._rank, to)
        due = self._group.clock.now() + seconds if seconds else 0.0
        data = bytes(memory.bytes_of(values))
        self._group.mailboxes[to].deliver(label, self._rank, data, due=due)

    def flush(self, *, until: float) -> None:
        """Nothing needs its memory any more: it was copied."""

    def drop(self) -> None:
        """Nothing is queued."""
