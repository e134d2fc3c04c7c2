"""One rank's sending and receiving: who did not send in time is named here, and nowhere else."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from atoll.collectives import schedule
from atoll.collectives.base import Label
from atoll.collectives.mailbox import Bytes, Mailbox
from atoll.collectives.places import Place
from atoll.errors import ConfigError, MissingRanks
from atoll.traffic import Traffic


class Port(Protocol):
    """How messages leave a rank."""

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Queues a message; never waits. `values` stay as they are until `flush`, or `drop`."""
        ...

    def flush(self, *, until: float) -> None:
        """Returns once nothing that was sent needs its memory any more.

        MissingRanks, naming those who did not take theirs, at the time `until`.
        """
        ...

    def drop(self) -> None:
        """What was not taken yet is not sent any more, and needs its memory no more."""
        ...


class Post:
    """A port that sends and a mailbox that receives, for one rank of a group or a sub-group.

    A sub-group has the port and the mailbox of the whole group, whose `members` it has: ranks are
    its own here, and the group's there.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        port: Port,
        mailbox: Mailbox,
        timeout_seconds: float,
        chunk_bytes: int,
        traffic: Traffic,
        members: Sequence[int] | None = None,
        subgroup: int = 0,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank} is not one of size={size} ranks, 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.before, self.after = schedule.neighbours(rank, size)
        self.others = schedule.others(rank, size)
        self.chunk_bytes = chunk_bytes
        self._port = port
        self._mailbox = mailbox
        self._timeout = timeout_seconds
        self._traffic = traffic  # of values; what names them is a few bytes more
        self.members = range(size) if members is None else members
        self.subgroup = subgroup

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Queues a message; `values` are kept, and stay as they are until `flush`."""
        self._port.send(self.members[to], self._own(label), values)
        self._traffic.sends(values.nbytes)

    def flush(self, *, until: float) -> None:
        """Returns once nothing that was sent needs its memory any more."""
        try:
            self._port.flush(until=until)
        except MissingRanks as error:
            if not self.subgroup:
                raise
            late = [self.members.index(one) for one in error.ranks if one in self.members]
            raise MissingRanks(
                f"{self._told(late)} did not take what was sent in time; the step is given up",
                ranks=late,
            ) from error

    def drop(self) -> None:
        """Gives up what was sent and not taken."""
        self._port.drop()

    def expect(self, label: Label, sender: int, place: Place) -> None:
        """A message may be received at `place` by whoever brings it, until `withdraw`."""
        self._mailbox.expect(self._own(label), self.members[sender], place)

    def withdraw(self) -> None:
        """Returns once nothing that comes is written to tensors any more."""
        self._mailbox.withdraw()

    def take(
        self,
        label: Label,
        sender: int,
        *,
        nbytes: int,
        until: float,
        with_others: Sequence[int] = (),
    ) -> Bytes:
        """A message of exactly `nbytes`; MissingRanks names `with_others` too if theirs is away."""
        own = self._own(label)
        try:
            taken = self._mailbox.take(own, self.members[sender], nbytes=nbytes, until=until)
        except MissingRanks:
            asked = sorted({*with_others, sender})
            absent = [k for k in asked if self._mailbox.missing([(own, self.members[k])])]
            raise MissingRanks(
                f"{label.key}: nothing came from {self._told(absent)} within {self._timeout:g} s; "
                f"nothing is filled in, the step is given up",
                ranks=absent,
            ) from None
        self._traffic.receives(nbytes)
        return taken

    def _own(self, label: Label) -> Label:
        """As the whole group knows it."""
        return replace(label, subgroup=self.subgroup) if self.subgroup else label

    def _told(self, ranks: Sequence[int]) -> str:
        """By their own numbers and, of a sub-group, by those of the whole group, too."""
        told = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        if not self.subgroup:
            return told
        return f"{told} ({', '.join(str(self.members[k]) for k in ranks)} of the whole group)"
