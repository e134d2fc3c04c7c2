"""Parts of a loss on groups of ranks of different size, joined by partial sums."""

from atoll.pools.counted import Counted, Through
from atoll.pools.topology import Topology

__all__ = ["Counted", "Through", "Topology"]
