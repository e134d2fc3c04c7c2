"""A strategy from outside Atoll: islands take turns, and each contribution closes its own round.

    round r: one island trains alone and hands in one half of the model, r odd the first half.
    Two rounds are open at a time, so the next island trains while the last contribution is folded.

Everything else is answered as in synchronous DiLoCo.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import RoundView
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.outer import OuterStep

HALVES = 2


@dataclass(frozen=True)
class Relay(Sync):
    """Turns in worker_id order, halves in turn."""

    lead = 1

    @classmethod
    def of(cls, manifest: Manifest) -> "Relay":
        """Refuses what a relay has no use for."""
        if manifest.dylu:
            raise ConfigError("dylu=true: a relay gives each island as many rows; leave it out")
        return cls(manifest)

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        names = [tensor.name for tensor in layout.tensors]
        middle = len(names) // HALVES
        return [names[:middle], names[middle:]]

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        return (round_number - 1) % HALVES

    def rows(
        self, round_number: int, live: Collection[str], speeds: Mapping[str, float]
    ) -> dict[str, int]:
        turns = sorted(live)
        whose = turns[round_number % len(turns) :][:1] if turns else []
        return dict.fromkeys(whose, self.manifest.rows_per_round)

    def first(self, round_number: int, began: int) -> int:
        return max(round_number - HALVES + 1, began)

    def has_quorum(self, view: RoundView) -> bool:
        return bool(view.accepted)

    def is_due(self, view: RoundView, *, seconds: float) -> bool:
        return bool(view.accepted)

    def waiting_for(self, view: RoundView) -> Set[str]:
        return set() if view.accepted else view.planned & view.live

    def is_short(self, view: RoundView) -> bool:
        return not view.accepted and not view.planned & view.live

    def outer(self, round_number: int, ticks_before: int) -> OuterStep:
        step = super().outer(round_number, ticks_before)
        return replace(step, step=(round_number + 1) // HALVES)
