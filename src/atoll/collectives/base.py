"""What collectives promise, whatever carries them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from atoll.collectives.codecs import WireCodec
from atoll.layout import Span

Op = Literal["gather", "reduce", "save", "control"]


@dataclass(frozen=True, slots=True)
class Key:
    """Which exchange of a training a call is: the same on all ranks, and never used twice."""

    group: int  # the generation in which the group was formed
    step: int
    op: Op
    micro: int = 0  # micro-batch of the step
    unit: int = 0

    def __str__(self) -> str:
        told = f"{self.op} of unit {self.unit}, step {self.step}.{self.micro}"
        return f"{told}, group {self.group}"


@dataclass(frozen=True, slots=True)
class Label:
    """What a message says it is; who sends it is read from the connection, never from here."""

    key: Key
    phase: int  # turn of a ring, or which of several exchanges of one call
    span: Span  # of the whole tensor
    subgroup: int = 0  # of the group's sub-groups, by `subgroups.number`; 0: of all ranks


class Handle(Protocol):
    """A collective that was begun."""

    def wait(self) -> None:
        """Returns when the result is there.

        MissingRanks when the deadline is over, naming those whose values did not come; what was
        given with `abort`; StaleGeneration when the group is over. Nothing is ever filled in.
        After an error, too, nothing reads or writes the tensors any more.
        """
        ...


class Collectives(Protocol):
    """The collectives of one rank of a group. All ranks begin the same ones in the same order.

    With sub-groups and sends there is one order of all that is exchanged, of which each rank begins
    its own: what was begun before is finished first, whichever sub-group it is of. Keys are unique
    over a group and all its sub-groups.

    Tensors are flat, contiguous and on the CPU, of one dtype and length on all ranks. A result has
    the same bits on every transport. Nothing may touch the tensors until the handle was waited for.

    With a `codec` fp32 values travel as its bytes; all ranks give the same one.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(
        self, key: Key, shard: Tensor, out: Tensor, *, codec: WireCodec | None = None
    ) -> Handle:
        """`out` becomes the shards of all ranks one after another, cut as `schedule.cut` says.

        `shard` may be this rank's part of `out` itself. Not so with a codec: `out` becomes what the
        bytes say on all ranks, the owner too, and `shard` must stay as it is.
        """
        ...

    def reduce_scatter(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        *,
        codec: WireCodec | None = None,
        residual: Tensor | None = None,
    ) -> Handle:
        """`out` becomes this rank's part of the SUM over all ranks' `values`.

        `values` are used up: they hold something else afterwards, and `out` may be this rank's part
        of them. With a codec each rank's values are rounded once by direct exchange, the owner's
        too, and a partial sum at every hop of a ring. A `residual` (bf16, as long as `values`,
        zeros at first) is added to what is rounded and takes what that dropped, for the next call;
        after an error it is of no more use.
        """
        ...

    def all_reduce(self, key: Key, values: Tensor, *, codec: WireCodec | None = None) -> Handle:
        """`values` become the SUM over all ranks, in place; with a codec rounded once more."""
        ...

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        """`values` become those of rank `source`, in place."""
        ...

    def exchange(self, key: Key, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """What each rank sent to this one; `parts[k]`, bytes (uint8), goes to rank k.

        `sizes[k]` is how many bytes rank k sends here; both sides know it, and nothing about it
        travels. Waits. Of this rank itself the part that was given comes back, not a copy. All of
        it is in memory at once, twice on some transports: large things are exchanged in batches.
        """
        ...

    def all_gather_bytes(self, key: Key, data: bytes, *, limit: int) -> list[bytes]:
        """The `data` of all ranks, of any length up to `limit`, which is the same on all. Waits.

        Where one has more, all ranks raise ProtocolError naming it, and no data travels.
        """
        ...

    def barrier(self, key: Key) -> Handle:
        """Done once every rank has begun it."""
        ...

    def send(self, key: Key, values: Tensor, *, to: int) -> Handle:
        """`values` go to rank `to`, another one, which receives them with the same key.

        May wait until it does: of two ranks that send to each other one receives first.
        """
        ...

    def receive(self, key: Key, out: Tensor, *, source: int) -> Handle:
        """`out` becomes what rank `source` sends to this one.

        Waiting raises LayoutMismatch where that has another length or dtype: `out` stays as it is,
        and the sender may find out at its deadline alone.
        """
        ...

    def subgroups(self, members: Sequence[Sequence[int]]) -> "list[Collectives | None]":
        """A sub-group for each list of ranks of this group; None where this rank is not in it.

        All ranks of this group call it at the same point with the same lists; some transports wait
        for the others here. A sub-group counts its members from 0 in the order given: its sums are
        added and its errors told by these numbers. Its messages are never taken for those of
        another sub-group or of this group. It ends with this group, and who aborts one of them
        aborts all.
        """
        ...

    def abort(self, error: Exception) -> None:
        """The group is over: whoever waits, or will, raises `error`."""
        ...
