"""Streaming DiLoCo (arXiv 2501.18512): a fragment of the model syncs every H/P steps, beside them.

    H = sync_every, P = num_fragments, h = H/P, tau = delay_steps, alpha = local_weight

Round r is h steps, then the hand-in of fragment (r-1) mod P: how far that fragment has moved since
it was last merged, so the rows of rounds r-P+1 to r are in it. Training goes on while it travels.
Exactly tau steps later, waiting if need be, the island takes the published fragment in:

    local = alpha*local + (1-alpha)*published

The last round carries the whole model. With P = 1 and tau = alpha = 0 this is synchronous DiLoCo.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import ALL
from atoll.strategies.diloco import blocks, of_mode
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.outer import OuterStep


@dataclass(frozen=True)
class Streaming(Sync):
    """The answers of a streaming run; all others are sync's."""

    fixed = ("sync_every",)  # which round is merged when follows from it

    @classmethod
    def of(cls, manifest: Manifest) -> "Streaming":
        """Refuses a schedule that does not come out even, and settings of other modes, by name."""
        of_mode.refuse_others(manifest, "streaming")
        of_mode.refuse_one_by_one(manifest, "streaming")
        every, fragments, delay = manifest.sync_every, manifest.num_fragments, manifest.delay_steps
        if every % fragments:
            raise ConfigError(
                f"sync_every={every} is not a multiple of num_fragments={fragments}; each fragment "
                f"needs the same number of steps between two syncs"
            )
        if delay >= every:
            raise ConfigError(
                f"delay_steps={delay} is not below sync_every={every}; a fragment must be merged "
                f"before it is handed in again"
            )
        return cls(manifest)

    @property
    def _count(self) -> int:
        return self.manifest.num_fragments

    @property
    def _steps(self) -> int:
        """Of a round."""
        return self.manifest.sync_every // self._count

    @property
    def lead(self) -> int:
        return -(-self.manifest.delay_steps // self._steps)

    @property
    def in_flight(self) -> int:
        return self.lead

    @property
    def local_weight(self) -> float:
        return self.manifest.local_weight

    @property
    def keeps_local(self) -> bool:
        return self._count > 1 or self.lead > 0 or self.local_weight > 0

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        return blocks.deal(layout, self._count, self.manifest.fragment_pattern)

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        return ALL if is_last and self._count > 1 else (round_number - 1) % self._count

    def may_end(self, fragment: int) -> bool:
        return fragment == ALL or self._count == 1

    def rows(
        self, round_number: int, live: Collection[str], speeds: Mapping[str, float]
    ) -> dict[str, int]:
        return dict.fromkeys(live, self._steps * self.manifest.inner.batch)

    def first(self, round_number: int, began: int) -> int:
        return max(round_number - self._count + 1, began)

    def due(self, round_number: int, step: int) -> Sequence[int]:
        """The round whose hand-in is exactly tau steps ago; without a delay, `needs` says it."""
        behind = self.manifest.delay_steps - step
        found = round_number - 1 - behind // self._steps
        return (found,) if behind % self._steps == 0 and 0 < found < round_number else ()

    def evaluators(
        self, asks: str, planned: Sequence[str], live: Collection[str], *, is_last: bool
    ) -> Sequence[str]:
        """One that holds the version: others may hold another when they ask."""
        return planned if is_last else [asks]

    def outer(self, round_number: int, ticks_before: int) -> OuterStep:
        """The optimizer counts the steps of a fragment.

        In the last round, which carries all of them, those of the one whose turn it is.
        """
        step = super().outer(round_number, ticks_before)
        return replace(step, step=(round_number - 1) // self._count + 1)
