"""Gradients of parameters on their way to the replicas that step: sums, and no division."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.pools.arrows.base import Arrow, Meeting, meets, packed, summed, unpacked
from atoll.pools.desk import Desk


@dataclass(frozen=True, slots=True)
class Return:
    """One message: gradients of these modules, from who speaks for a pool to who owns them."""

    to: int
    modules: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Returned(Arrow):
    """Gradients that a pool has of parameters it does not own: summed there, sent back once.

    They land on the first replica of the owner's block; its reduction gives them to the others.
    """

    pool: str
    source: int  # rank that sends
    ranks: tuple[int, ...]
    returns: tuple[Return, ...]

    def meetings(self) -> Sequence[Meeting]:
        sends = [Meeting(self.name, (self.source, one.to), is_send=True) for one in self.returns]
        return [*meets(self.name, self.ranks), *sends]

    def run(self, desk: Desk) -> None:
        if desk.seat.pool == self.pool:
            places = self.places(desk, self.returns)
            flat = packed(places)
            self.summed(desk, flat)
            _put(flat, places)
        for one in self.returns:
            if desk.seat.rank == self.source:
                flat = packed(self.places(desk, [one]))
                desk.world.send(desk.key(self.unit, 1), flat, to=one.to).wait()
            elif desk.seat.rank == one.to:
                self.take(desk, one)

    def summed(self, desk: Desk, flat: Tensor) -> None:
        """What the pool's ranks have becomes their SUM."""
        summed(desk, self.pool, flat, self.unit)

    def take(self, desk: Desk, one: Return) -> None:
        """Adds what comes to the owner's own."""
        places = self.places(desk, [one])
        flat = torch.empty_like(packed(places))
        desk.world.receive(desk.key(self.unit, 1), flat, source=self.source).wait()
        for place, part in zip(places, unpacked(flat, places), strict=True):
            place.add_(part)

    def places(self, desk: Desk, returns: Sequence[Return]) -> list[Tensor]:
        """Where the gradients, and the canary's counts, stand on this rank."""
        grads = [desk.param_grads[name] for one in returns for name in one.tensors]
        return [*grads, *_counts(desk, [name for one in returns for name in one.modules])]


@dataclass(frozen=True, kw_only=True)
class Reduce(Arrow):
    """The gradients of an owner's parameters, summed over the replicas of each block."""

    pool: str
    blocks: Mapping[str, tuple[int, ...]]  # ranks by group
    modules: Mapping[int, tuple[str, ...]]  # by rank
    tensors: Mapping[int, tuple[str, ...]]  # by rank

    def meetings(self) -> Sequence[Meeting]:
        return [one for ranks in self.blocks.values() for one in meets(self.name, ranks)]

    def run(self, desk: Desk) -> None:
        if desk.seat.pool == self.pool:
            places = self.places(desk)
            flat = packed(places)
            summed(desk, desk.seat.block_group, flat, self.unit)
            _put(flat, places)

    def places(self, desk: Desk) -> list[Tensor]:
        """Where the gradients, and the canary's counts, stand on this rank."""
        grads = [desk.param_grads[name] for name in self.tensors[desk.seat.rank]]
        return [*grads, *_counts(desk, self.modules[desk.seat.rank])]


def _counts(desk: Desk, modules: Sequence[str]) -> list[Tensor]:
    return [desk.param_counts[name] for name in modules] if desk.is_counting else []


def _put(flat: Tensor, places: Sequence[Tensor]) -> None:
    for place, part in zip(places, unpacked(flat, places), strict=True):
        place.copy_(part)
