"""A strategy for tests: two halves in turn, and every third round the whole model, two open."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.layout import Layout
from atoll.strategies.base import ALL
from atoll.strategies.diloco.sync import Sync


@dataclass(frozen=True)
class WholeNowAndThen(Sync):
    """Rounds overlap where they can: each begins once the version before it is there."""

    lead = 1

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        names = [tensor.name for tensor in layout.tensors]
        return [names[: len(names) // 2], names[len(names) // 2 :]]

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        return ALL if round_number % 3 == 0 else round_number % 2

    def needs(self, round_number: int) -> int:
        return round_number - 1
