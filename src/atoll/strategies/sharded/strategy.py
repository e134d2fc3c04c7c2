"""The answers of a sharded run that are asked of every strategy, and where its steps lie.

C = save_every * checkpoint_every steps are a round, from checkpoint to checkpoint
round r is the steps ((r-1)*C, r*C], and leases C*B rows, B = inner.batch for all ranks
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.collectives import schedule
from atoll.layout import ELEMENT_BYTES, Layout, Span
from atoll.protocol.manifest import Manifest, ShardedSettings
from atoll.rows import Late
from atoll.strategies.sharded import settings, units
from atoll.strategies.sharded.units import Units

COPIES = 3  # in a save: weights, first and second moments
_FREE = ("deadline_seconds",)  # what a new manifest version may change


@dataclass(frozen=True)
class Sharded:
    """A sharded run; fulfils `base.AnyStrategy`."""

    manifest: Manifest

    by_step = True
    lead = 1  # the next round's rows are leased while this one trains
    dials = True
    gathers = False
    # Recorded steps, shards and rows depend on them, and a group trains under one set.
    fixed = tuple(f"sharded.{name}" for name in ShardedSettings.model_fields if name not in _FREE)

    @classmethod
    def of(cls, manifest: Manifest) -> "Sharded":
        """Refuses settings of other strategies, and those that do not go together, by name."""
        settings.check(manifest)
        return cls(manifest)

    @property
    def rows_each(self) -> int:
        return self.round_steps * self.manifest.inner.batch

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        """The units: the root, which holds all that is in no block, then one for each block."""
        return units.names(layout)

    # Steps

    @property
    def round_steps(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.manifest.sharded.round_steps

    def steps(self, round_number: int) -> tuple[int, int]:
        """The first and the last step of a round."""
        return (round_number - 1) * self.round_steps + 1, round_number * self.round_steps

    def round_of(self, step: int) -> int:
        """The round that a step is of; step 0, the initial weights, is before the first."""
        return -(-step // self.round_steps)

    def late_rows(self, late: Iterable[Late]) -> list[Span]:
        """Which rows of a round late ranks had, by their numbers in it; all are of one round."""
        batch = self.manifest.inner.batch

        def rows(step: int, rank: int, size: int) -> Span:
            first = (step - 1) % self.round_steps * batch
            own = schedule.cut(batch, size)[rank]
            return Span(first + own.start, first + own.stop)

        return [rows(*one) for one in late]

    # Shards

    def shard(self, layout: Layout, rank: int, size: int) -> tuple[Span, ...]:
        """What a rank of `size` owns of each unit, in spans of the run's flat layout."""
        return Units.of(layout).owned(rank, size)

    def save_bytes(self, layout: Layout, rank: int, size: int) -> int:
        """How large a rank's save is: `COPIES` times its shard in fp32."""
        return COPIES * ELEMENT_BYTES * Units.of(layout).shard_size(rank, size)
