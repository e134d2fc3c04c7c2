"""A strategy for tests of several open rounds: every island trains every round, two are open.

Halves of the model go in turn, round r odd the first half; everything else is as in sync. It is
installed as a distribution of its own (`tests.distributions`), so nothing of Atoll is patched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.layout import Layout
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.outer import OuterStep


@dataclass(frozen=True)
class Overlap(Sync):
    """Two rounds open, two fragments."""

    lead = 1

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        first, *others = [tensor.name for tensor in layout.tensors]
        return [[first], others]

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        return (round_number - 1) % 2

    def first(self, round_number: int, began: int) -> int:
        return max(round_number - 1, began)

    def outer(self, round_number: int, ticks_before: int) -> OuterStep:
        return replace(super().outer(round_number, ticks_before), step=(round_number + 1) // 2)
