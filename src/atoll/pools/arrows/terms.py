"""What a term needs of other ranks: its count, its global sum, and who contributes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.pools.arrows.base import Arrow, Meeting, meets, summed
from atoll.pools.calls import Item, divisor
from atoll.pools.desk import Desk
from atoll.pools.global_sums import global_sum
from atoll.pools.placement import Seat


@dataclass(frozen=True, kw_only=True)
class Count(Arrow):
    """The integer SUM of a term's counts over the pool that computes it, item by item.

    Over the producing pool, whatever groups its gradients cross afterwards.
    """

    pool: str
    ranks: tuple[int, ...]
    items: tuple[Item, ...]

    def meetings(self) -> Sequence[Meeting]:
        return meets(self.name, self.ranks)

    def run(self, desk: Desk, counts: Mapping[Item, int]) -> dict[Item, int]:
        """Of all ranks, by item, from this rank's own."""
        found = torch.tensor([counts.get(item, 0) for item in self.items], dtype=torch.int64)
        summed(desk, self.pool, found, self.unit)
        return {item: int(count) for item, count in zip(self.items, found, strict=True)}

    def scale(self, desk: Desk, coeffs: Tensor, term: str, counts: Mapping[Item, int]) -> Tensor:  # noqa: ARG002
        """coeff / global count in each lane: the one scale of this term, for all destinations."""
        return coeffs / self.divisor(term, counts)

    def divisor(self, term: str, counts: Mapping[Item, int]) -> float:
        """The global count; EmptySum, on all ranks of the pool, where there is nothing."""
        return divisor(term, sum(counts.values()))


@dataclass(frozen=True, kw_only=True)
class Once(Arrow):
    """Which replica contributes what all of them have: the first of each block."""

    def contributes(self, seat: Seat) -> bool:
        """Whether this rank runs the backward."""
        return seat.is_first

    def counts(self, seat: Seat) -> bool:
        """Whether this rank's count is in the sum."""
        return seat.is_first


@dataclass(frozen=True, kw_only=True)
class GlobalSum(Arrow):
    """The sum that a Through is not linear in, over the ranks that share its rows out.

    Where blocks share the items out, each block has the whole sum of its own items.
    """

    groups: Mapping[str, tuple[int, ...]]
    by_block: bool

    def meetings(self) -> Sequence[Meeting]:
        return [one for ranks in self.groups.values() for one in meets(self.name, ranks)]

    def group(self, seat: Seat) -> str:
        return seat.block_group if self.by_block else seat.pool

    def speaks(self, desk: Desk) -> bool:
        """Whether this rank logs what all ranks of its group have."""
        return (
            desk.seat.is_first
            if self.by_block
            else desk.seat == desk.placement.first(desk.seat.pool)
        )

    def scale(self, desk: Desk, coeffs: Tensor) -> Tensor:  # noqa: ARG002
        """coeff: the count is inside of what the term makes of the sum."""
        return coeffs

    def run(self, desk: Desk, sums: Tensor, micro: int) -> Tensor:
        """The same bits on every rank; a rank's gradient of it is that of its own part."""
        group = desk.groups[self.group(desk.seat)]
        return global_sum(sums, group, desk.key(self.unit, micro))


@dataclass(frozen=True, kw_only=True)
class Log(Arrow):
    """Losses and counts for people, on every rank: a SUM of shares like everything else."""

    ranks: tuple[int, ...]

    def meetings(self) -> Sequence[Meeting]:
        return [*meets(self.name, self.ranks), *meets(self.name, self.ranks)]

    def run(self, desk: Desk) -> tuple[dict[str, float], dict[str, int]]:
        """The loss of each term, and its count."""
        losses = torch.tensor([desk.losses.get(t, 0.0) for t in desk.terms], dtype=torch.float64)
        counts = torch.tensor([desk.counts.get(t, 0) for t in desk.terms], dtype=torch.int64)
        summed(desk, "world", losses, self.unit, 0)
        summed(desk, "world", counts, self.unit, 1)
        names = desk.terms
        return (
            {name: float(loss) for name, loss in zip(names, losses, strict=True)},
            {name: int(count) for name, count in zip(names, counts, strict=True)},
        )
