"""How far ahead a rank may work: what is gathered and reduced beside the computing takes memory.

The bound on a rank's tensors, without activations, is its shard and four of the largest units. The
root's weights and gradient live through the whole backward pass; a block needs its own two.
"""

from dataclasses import dataclass

from atoll.strategies.sharded.units import ROOT, Units

UNITS = 4
# The bound leaves a tenth for what is beside the four numbers (weights, two moments, the sum) that
# a shard has of each element; scratch tiles need little of it.
SLACK = 0.3


@dataclass(frozen=True)
class Budget:
    """What may be done ahead in the backward pass; the same on all ranks."""

    gathers: bool  # the next block's weights, while this one is computed
    reduces: bool  # the last block's gradient is reduced meanwhile

    @classmethod
    def of(cls, units: Units, size: int) -> "Budget":
        """What fits."""
        root = sum(unit.size for unit in units.units if unit.module == ROOT)
        block = max((unit.size for unit in units.units if unit.module != ROOT), default=0)
        room = UNITS * units.largest + SLACK * units.layout.size / size
        needed = 2 * root + 2 * block
        return cls(gathers=needed + block <= room, reduces=needed + 2 * block <= room)
