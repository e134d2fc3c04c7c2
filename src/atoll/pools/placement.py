"""Which rank of the world sits where: pool, block, rows and items follow from sizes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.layout import Span
from atoll.pools.declared import Pool
from atoll.pools.topology import Topology

WORLD = "world"


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place: the `place`-th of its block, with these rows of every step."""

    rank: int
    pool: str
    block: int
    place: int
    rows: Span

    @property
    def is_first(self) -> bool:
        """Whether it speaks for the replicas of its block."""
        return self.place == 0

    @property
    def block_group(self) -> str:
        return block_group(self.pool, self.block)


def block_group(pool: str, block: int) -> str:
    """How the group of one block's ranks is called; that of a pool is called like the pool."""
    return f"{pool}/{block}"


class Placement:
    """Ranks in the order of the pools as declared, block by block."""

    def __init__(self, top: Topology) -> None:
        self.top = top
        self.seats: list[Seat] = []
        for pool in top.pools.values():
            _check(top, pool)
            each = top.num_rows // pool.ranks
            for block in range(pool.blocks):
                for place in range(pool.ranks):
                    rows = Span(place * each, (place + 1) * each)
                    self.seats.append(Seat(len(self.seats), pool.name, block, place, rows))

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return len(self.seats)

    def of(self, pool: str) -> list[Seat]:
        """The seats of a pool, in order."""
        return [seat for seat in self.seats if seat.pool == pool]

    def first(self, pool: str) -> Seat:
        """Who speaks for a pool."""
        return self.of(pool)[0]

    def firsts(self, pool: str) -> list[Seat]:
        """Who speaks for each block."""
        return [seat for seat in self.of(pool) if seat.is_first]

    def groups(self) -> dict[str, list[int]]:
        """The ranks of the world, of each pool and of each block."""
        found = {WORLD: [seat.rank for seat in self.seats]}
        for pool in self.top.pools.values():
            found[pool.name] = [seat.rank for seat in self.of(pool.name)]
        for seat in self.seats:
            found.setdefault(seat.block_group, []).append(seat.rank)
        return found

    def items(self, seat: Seat) -> dict[str, Sequence[str]]:
        """The items of each axis that a rank has: its block's, or all."""
        blocks = self.top.pools[seat.pool].blocks
        return {
            axis.name: axis.of_block(seat.block, blocks) if axis.over == seat.pool else axis.items
            for axis in self.top.axes.values()
        }


def _check(top: Topology, pool: Pool) -> None:
    if top.num_rows % pool.ranks:
        raise ConfigError(
            f"rows={top.num_rows} do not divide over pool {pool}; each rank of a block takes as "
            f"many rows, so choose a divisor of {top.num_rows}"
        )
    axis = top.axis_over(pool.name)
    if axis is None and pool.blocks > 1:
        raise ConfigError(
            f"pool {pool.name!r} has blocks={pool.blocks} and no axis that they share out; declare "
            f"top.axis(name, items, over={pool.name}), or give it more ranks instead"
        )
    if axis is not None and len(axis.items) < pool.blocks:
        raise ConfigError(
            f"axis {axis.name!r} has {len(axis.items)} items for the {pool.blocks} blocks of pool "
            f"{pool.name!r}; each block needs one at least"
        )
