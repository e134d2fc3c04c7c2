"""A sharded run trained once more as its ledger says: which group made which steps, in turn.

What the recorded weights are made of: steps that a later group went back behind do not count, and
neither do ranks in steps that were committed without them. The groups train here without a
coordinator, saves, failures or lateness, so that equal digests show that none of these left a
trace. Holds the whole model: for proofs of small runs, never part of a run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from atoll import torch_threads
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.data import batches as batching
from atoll.data import numbered
from atoll.data import registry as datasets
from atoll.data.base import Dataset
from atoll.layout import Layout, Span
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GroupRecord
from atoll.models import gpt, init
from atoll.models import registry as models
from atoll.protocol.manifest import Manifest
from atoll.rows import Late, RowRange
from atoll.simulate.fibers import Scheduler
from atoll.strategies import registry
from atoll.strategies.sharded import build, micro_batches
from atoll.strategies.sharded.shard import SAVED, Shard
from atoll.strategies.sharded.units import Units
from atoll.sums import digest as digests
from atoll.versions import recorded
from atoll.versions.manifests import Manifests

LIMIT_SECONDS = 1e7

Sections = dict[str, Tensor]  # of the whole model, each flat, by name


@dataclass(frozen=True)
class Segment:
    """Steps (after, until] that one group of `size` ranks made, and that count."""

    size: int
    after: int
    until: int


def segments(groups: Sequence[GroupRecord], last: int) -> list[Segment]:
    """What leads to step `last`: of each group what no later one went back behind."""
    path: list[Segment] = []
    for group in groups:
        path = [
            Segment(s.size, s.after, min(s.until, group.step)) for s in path if s.after < group.step
        ]
        path.append(Segment(len(group.members), group.step, last))
    return [segment for segment in path if segment.after < segment.until]


def retrained(ledger: Ledger, *, location: str | None = None) -> str:
    """The params digest of the newest checkpoint, trained once more from the initial weights."""
    manifest = Manifests.of(ledger).first.manifest
    with ledger.reading() as t:
        newest = t.checkpoints.newest()
        assert newest is not None, "a run without a checkpoint has nothing to compare"
        path = segments(t.groups.all(), newest.step)
        late = frozenset(one for c in t.checkpoints.all() for one in c.late)
        leases = {n: t.leases.of_round(n) for n in range(1, newest.round + 1)}
    # Rows of late ranks too, whatever became of them: a step's rows are counted with them.
    ranges = {n: numbered.joined(x.row_range for x in held) for n, held in leases.items()}
    with torch_threads.kept():
        torch_threads.use(manifest.inner.threads)
        return _Retraining(manifest, ranges, late, location).digest_of(path)


class _Retraining:
    """The state of the whole model, from segment to segment."""

    def __init__(
        self,
        manifest: Manifest,
        ranges: dict[int, list[RowRange]],
        late: frozenset[Late],
        location: str | None,
    ) -> None:
        self._manifest = manifest
        self._ranges = ranges
        self._late = late
        self._strategy = registry.sharded(manifest)
        self._layout: Layout = recorded.layout_of(manifest)
        self._units = Units.of(self._layout)
        self._dataset: Dataset = datasets.open_dataset(manifest.data.definition, location=location)
        self._state: Sections = {name: self._layout.zeros() for name in SAVED}
        views = self._layout.views(self._state["weights"])
        for name, value in init.initial(
            manifest.model.definition, self._layout, seed=manifest.seed
        ):
            views[name].copy_(value)

    def digest_of(self, path: Sequence[Segment]) -> str:
        for number, segment in enumerate(path, start=1):
            self._train(number, segment)
        return digests.digest(self._layout, self._state["weights"]).root

    def _train(self, number: int, segment: Segment) -> None:
        scheduler = Scheduler()
        group = LocalGroup(segment.size, clock=scheduler, group=number)
        shards = [Shard(self._units, rank=rank, size=segment.size) for rank in range(segment.size)]
        for shard in shards:
            for name in SAVED:
                shard.fill(name, 0, self._state[name])
        fibers = [
            scheduler.spawn(f"rank-{rank}", partial(self._rank, shard, group, number, segment))
            for rank, shard in enumerate(shards)
        ]
        scheduler.run_until(lambda: all(f.done for f in fibers), limit_seconds=LIMIT_SECONDS)
        whole = Span(0, self._layout.size)
        for shard in shards:
            for name in SAVED:
                for flat, place in shard.place(whole):
                    flat.of(self._state[name]).copy_(shard.view(name, place))

    def _rank(self, shard: Shard, group: LocalGroup, number: int, segment: Segment) -> None:
        manifest, settings = self._manifest, self._manifest.sharded
        member = group.rank(shard.rank, Inline(), way=settings.exchange)
        model = models.hollow(manifest.model.definition)
        steps = build.step(manifest, model, shard, member, group=number, clock=group.clock)
        for step, rows, tokens in self._batches(segment):
            parts = micro_batches.of(
                len(rows), rank=shard.rank, size=segment.size, count=settings.micro_batches
            )
            # Who was late counts as none, as a rank without rows does.
            counts = (step, shard.rank, segment.size) not in self._late
            tokens_each = self._dataset.block if counts else 0
            given = [(p.rows.of(rows), p.num_rows * tokens_each) for p in parts]
            rate = manifest.inner.lr * manifest.inner.schedule.factor(tokens)
            member.advance(step)
            steps.train(step, given, gpt.loss, lr=rate)
        steps.engine.close()

    def _batches(self, segment: Segment) -> Iterator[tuple[int, Tensor, int]]:
        """Each step of the segment, its rows, and the run's tokens before it."""
        batch, seed = self._manifest.inner.batch, self._manifest.seed
        for step in range(segment.after + 1, segment.until + 1):
            number = self._strategy.round_of(step)
            first, _ = self._strategy.steps(number)
            found = batching.batches(
                self._dataset, self._ranges[number], batch=batch, seed=seed, skip=step - first
            )
            yield step, next(found), (step - 1) * batch * self._dataset.block
