"""One rank's sending and receiving: who did not send in time is named here, and nowhere else."""

from collections.abc import Sequence
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
    """A port that sends and a mailbox that receives, for one rank of a group."""

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

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Queues a message; `values` are kept, and stay as they are until `flush`."""
        self._port.send(to, label, values)
        self._traffic.sends(values.nbytes)

    def flush(self, *, until: float) -> None:
        """Returns once nothing that was sent needs its memory any more."""
        self._port.flush(until=until)

    def drop(self) -> None:
        """Gives up what was sent and not taken."""
        self._port.drop()

    def expect(self, label: Label, sender: int, place: Place) -> None:
        """A message may be received at `place` by whoever brings it, until `withdraw`."""
        self._mailbox.expect(label, sender, place)

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
        try:
            taken = self._mailbox.take(label, sender, nbytes=nbytes, until=until)
        except MissingRanks:
            asked = [(label, one) for one in (*with_others, sender)]
            absent = self._mailbox.missing(asked)
            raise MissingRanks(
                f"{label.key}: nothing came from rank{'s' * (len(absent) > 1)} "
                f"{', '.join(map(str, absent))} within {self._timeout:g} s; nothing is filled in, "
                f"the step is given up",
                ranks=absent,
            ) from None
        self._traffic.receives(nbytes)
        return taken
