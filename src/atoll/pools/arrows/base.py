"""What all arrows have: a name, a number for their messages, and the ranks that meet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from atoll.pools.desk import Desk


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks that take part in one exchange; of a send the first one sends."""

    arrow: str
    ranks: tuple[int, ...]
    is_send: bool = False

    def __str__(self) -> str:
        told = f"{self.ranks[0]} -> {self.ranks[1]}" if self.is_send else f"{list(self.ranks)}"
        return f"{self.arrow}: {told}"


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """`unit` tells its messages from those of other arrows of the same step."""

    name: str
    unit: int = field(default=0, compare=False)

    def meetings(self) -> Sequence[Meeting]:
        """The exchanges of `run`, in its order; static checks read them."""
        return ()


def meets(arrow: str, ranks: Sequence[int]) -> list[Meeting]:
    """One collective, if there is anybody to meet."""
    return [Meeting(arrow, tuple(ranks))] if len(ranks) > 1 else []


def packed(parts: Sequence[Tensor]) -> Tensor:
    """One flat tensor, in the order given; memory of its own."""
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in the shapes of these."""
    stops = list(accumulate(one.numel() for one in like))
    return [
        flat[stop - one.numel() : stop].view(one.shape)
        for stop, one in zip(stops, like, strict=True)
    ]


def summed(desk: Desk, group: str, flat: Tensor, unit: int, micro: int = 0) -> None:
    """`flat` becomes the SUM over the group, in place; nothing else is ever done to it."""
    desk.groups[group].all_reduce(desk.key(unit, micro), flat).wait()
