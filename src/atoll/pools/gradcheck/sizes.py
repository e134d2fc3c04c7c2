"""At which sizes a topology is checked, and what they are called."""

from collections.abc import Iterator, Sequence

from atoll.errors import ConfigError
from atoll.pools.gradcheck.asked import Sizes
from atoll.pools.gradcheck.outcome import Size
from atoll.pools.plan import planned
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace

MAX_RANKS = 16  # of a world that a check thinks of by itself
OTHERS = 2


def named(top: Topology) -> Size:
    """What the sizes are called, in the order of the pools: (4, 2x2, 2)."""
    shared = [axis.over for axis in top.axes.values()]
    symbols: dict[str, int] = {}
    parts: list[str] = []
    for name, pool in top.pools.items():
        symbols[f"n_{name}"] = pool.size
        if name not in shared:
            parts.append(f"{pool.ranks}")
            continue
        parts.append(f"{pool.blocks}x{pool.ranks}")
        suffix = "" if len(shared) == 1 else f"_{name}"
        symbols[f"n_per_block{suffix}"] = pool.ranks
        symbols[f"n_blocks{suffix}"] = pool.blocks
    return Size(f"({', '.join(parts)})", symbols)


def of(top: Topology, trace: Trace, asked: Sequence[Sizes] | None) -> list[Topology]:
    """Those asked for; else the file's own, with two more where it names no others.

    ConfigError where one does not fit.
    """
    if asked:
        return [top.sized(**sizes) for sizes in asked]
    if top.sizes:
        return [top, *(top.sized(**sizes) for sizes in top.sizes)]
    return [top, *_others(top, trace)]


def _others(top: Topology, trace: Trace) -> Iterator[Topology]:
    """Each pool another size than it is now, as far as rows and edges let it."""
    rows = range(1, top.num_rows + 1)
    divisors = [n for n in rows if top.num_rows % n == 0 and n < MAX_RANKS]
    found = 0
    for shift in range(1, len(divisors)):
        other = top.sized(
            **{
                name: (pool.blocks, _shifted(divisors, pool.ranks, shift + place))
                for place, (name, pool) in enumerate(top.pools.items())
            }
        )
        if found < OTHERS and _fits(other, trace):
            found += 1
            yield other


def _shifted(divisors: Sequence[int], ranks: int, shift: int) -> int:
    at = divisors.index(ranks) if ranks in divisors else 0
    return divisors[(at + shift) % len(divisors)]


def _fits(top: Topology, trace: Trace) -> bool:
    if sum(pool.size for pool in top.pools.values()) > MAX_RANKS:
        return False
    try:
        planned(top, trace)
    except ConfigError:
        return False
    return True
