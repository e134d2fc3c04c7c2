"""A rank's training in one group: restored, stepped, saved, until the group or the run ends."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.clock import Clock
from atoll.collectives import probe, schedule
from atoll.collectives.base import Key
from atoll.data import batches as batching
from atoll.data.base import Dataset
from atoll.errors import ConfigError, ProtocolError, StaleContribution
from atoll.island.prefetch import RowPrefetch
from atoll.island.sharded import restore as restoring
from atoll.island.sharded.errands import Spawn
from atoll.island.sharded.figures import Missed
from atoll.island.sharded.saving import RoundEnd, Saving
from atoll.island.sharded.shield import Shield
from atoll.island.sharded.source import SaveSource
from atoll.island.sharded.watch import Place
from atoll.layout import Span
from atoll.protocol.manifest import Manifest
from atoll.protocol.sharded import BoundaryReply, BoundaryRequest, Interval, Restore
from atoll.rows import Late
from atoll.strategies.sharded import build, micro_batches
from atoll.strategies.sharded.holding import Holding
from atoll.strategies.sharded.saves import CHUNK_BYTES, NO_NOTES, Notes, Saves
from atoll.strategies.sharded.shard import SAVED, Shard
from atoll.strategies.sharded.step import Made, Step
from atoll.strategies.sharded.units import Units

log = logging.getLogger(__name__)

BOUNDARY_SECONDS = 5.0  # a long poll; what goes on beside is looked at in between
NOTES = 9  # in place of a unit in the key of the exchange of notes; the probe has the first few

Evaluate = Callable[[nn.Module, Tensor], tuple[float, int]]


@dataclass(frozen=True)
class Loaded:
    """What `run.load` binds together."""

    model: nn.Module
    units: Units
    evaluate: Evaluate | None


@dataclass
class Given:
    """A micro-batch that a script has been given and not stepped on yet."""

    rows: Tensor
    loss: float | None = None


class Training:
    """For one thread. After an error nothing of it can be used but `close`."""

    def __init__(
        self,
        loaded: Loaded,
        place: Place,
        *,
        manifest: Manifest,
        kept: Saves,
        offered: SaveSource,
        home: Path,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self.place = place
        self.manifest = manifest
        self._loaded = loaded
        self._kept = kept
        spans = tuple(unit.span for unit in loaded.units.units)
        self._holding = Holding(spans, place.size, place.rank)
        before = Holding(spans, place.size, (place.rank - 1) % place.size)
        self._shield = Shield(place.peers)
        settings = manifest.sharded
        self._shard = Shard(
            loaded.units,
            rank=place.rank,
            size=place.size,
            offload=settings.offload,
            directory=home,
        )
        self._clock = clock
        self._step: Step | None = None  # once the shard is restored
        self._saving = Saving(kept, offered, place, before=before, clock=clock, spawn=spawn)
        self._notes = NO_NOTES
        self._can_evaluate = False  # this rank and all others, who compute together
        self.given: Given | None = None

    # From the group's forming to its first step

    def restore(self) -> int:
        """Tries the group's sums, and loads what it goes back to; the last step that is in it."""
        place, wanted = self.place, self._wanted()
        probe.check_sums(place.peers, group=place.number)
        restoring.restore(
            wanted,
            self._holding,
            lambda section, start, data: self._shard.write(SAVED[section], start, data),
            peers=place.peers,
            talk=place.talk,
            kept=self._kept,
            layout=self._loaded.units.layout,
            initial_digest=self.manifest.model.initial_digest,
        )
        self._notes = self._recalled(wanted)
        # Here all meet, too: all have read what they need before anybody drops or makes a save.
        self._can_evaluate = self._all_evaluate()
        self._kept.went_back_to(wanted.step, group=wanted.group)
        self._step = self._opened(wanted.step)
        return wanted.step

    def _opened(self, version: int) -> Step:  # noqa: ARG002  # all ranks step together
        """The steps after `version`, which is the last one in the shard."""
        number, manifest, model = self.place.number, self.manifest, self._loaded.model
        return build.step(
            manifest, model, self._shard, self._shield, group=number, clock=self._clock
        )

    @property
    def _stepping(self) -> Step:
        assert self._step is not None, "the shard is restored before the first step"
        return self._step

    def _wanted(self) -> Restore:
        wanted = self.place.formed.restore
        if wanted is None:
            raise ProtocolError(
                f"group={self.place.number} says nothing of what its ranks go back to; run the "
                f"same release of atoll on both sides"
            )
        return wanted

    def _recalled(self, wanted: Restore) -> Notes:
        """What is known of the round so far: of the first rank that has it, for all."""
        if wanted.source != "save":
            return NO_NOTES
        own = self._kept.notes(wanted.step, wanted.parts)
        told = torch.zeros(4 * self.place.size, dtype=torch.float64)
        mine = torch.zeros(4, dtype=torch.float64)
        if own is not None:
            figures = [1.0, own.loss_sum, float(own.tokens), float(len(own.late))]
            mine = torch.tensor(figures, dtype=torch.float64)
        key = Key(self.place.number, 0, "control", unit=NOTES)
        self.place.peers.all_gather(key, mine, told).wait()
        for source, (has, loss_sum, tokens, count) in enumerate(told.view(-1, 4).tolist()):
            if has:
                return Notes(loss_sum, int(tokens), self._late_of(source, own, int(count)))
        return NO_NOTES

    def _late_of(self, source: int, own: Notes | None, count: int) -> tuple[Late, ...]:
        """Who was late in the round so far, as the rank `source` remembers it."""
        told = torch.zeros(count, 3, dtype=torch.int64)
        if source == self.place.rank and own is not None and count:
            told = torch.tensor(own.late, dtype=torch.int64)
        if count:
            key = Key(self.place.number, 0, "control", unit=NOTES + 3)
            self.place.peers.broadcast(key, told.view(-1), source=source).wait()
        return tuple((step, rank, size) for step, rank, size in told.tolist())

    def _all_evaluate(self) -> bool:
        """Whether every rank was given `evaluate`; one that was not would be waited for."""
        told = torch.zeros(self.place.size, dtype=torch.float64)
        mine = torch.tensor([float(self._loaded.evaluate is not None)], dtype=torch.float64)
        key = Key(self.place.number, 0, "control", unit=NOTES + 1)
        self.place.peers.all_gather(key, mine, told).wait()
        if self.manifest.evaluate.every and not told.all():
            names = [m.worker_id for m in self.place.formed.members]
            without = [name for name, can in zip(names, told.tolist(), strict=True) if not can]
            about = {"group": self.place.number, "without": without}
            log.warning("no held-out loss: not all ranks were given evaluate", extra=about)
        return bool(told.all())

    # Steps

    def steps(
        self, interval: Interval, after: int, dataset: Dataset, ahead: RowPrefetch
    ) -> Iterator[Tensor | Made | Missed]:
        """Trains the steps of `interval` that come after `after`.

        Gives each micro-batch's rows, and what each step came to that this rank is in.
        """
        reading = {"batch": self.manifest.inner.batch, "seed": self.manifest.seed}
        following = max(interval.first, after + 1)
        while following <= interval.last:
            rows = ahead.batches(interval.ranges, skip=following - interval.first, **reading)
            for number, batch in enumerate(rows, start=following):
                try:
                    yield from self._one(interval, number, batch, dataset.block)
                    following = number + 1
                except StaleContribution as error:
                    following = self._was_late(number, error)
                    yield Missed(number, following)
                    break
            else:
                return

    def _one(
        self, interval: Interval, number: int, batch: Tensor, block: int
    ) -> Iterator[Tensor | Made]:
        inner, settings = self.manifest.inner, self.manifest.sharded
        self.place.check()
        self.place.peers.advance(number)
        self._stepping.begin(number)
        parts = micro_batches.of(
            len(batch), rank=self.place.rank, size=self.place.size, count=settings.micro_batches
        )
        for part in parts:
            yield from self._micro(part.rows.of(batch), part.num_rows * block)
        tokens = interval.tokens + (number - interval.first) * inner.batch * block
        made = self._stepping.commit(lr=inner.lr * inner.schedule.factor(tokens))
        self._count(made, is_first=number == interval.first)
        yield made
        self._save_between(number, is_last=number == interval.last)

    def _count(self, made: Made, *, is_first: bool) -> None:
        """Notes what a step came to, the first one of a round or another."""
        before = NO_NOTES if is_first else self._notes
        self._notes = Notes(before.loss_sum + made.loss_sum, before.tokens + made.tokens)

    def _save_between(self, number: int, *, is_last: bool) -> None:
        """Saves a step where one is to be saved; the last one of a round comes with its end."""
        if number % self.manifest.sharded.save_every == 0 and not is_last:
            self._save(number)

    def _was_late(self, number: int, error: StaleContribution) -> int:  # noqa: ARG002
        """The step to go on with after one that was committed without this rank."""
        raise error

    def _micro(self, rows: Tensor, tokens: int) -> Iterator[Tensor]:
        self._stepping.begin_micro(tokens)
        self.given = given = Given(rows)
        yield rows
        self.given = None
        self._shield.check()
        if given.loss is None:
            raise ConfigError("run.step(loss=...) must be called once for every batch")
        self._stepping.finish_micro(given.loss)
        self._shield.check()

    def _save(self, step: int, *, ends: RoundEnd | None = None) -> None:
        self._saving.save(step, self._saved_bytes(), self._notes, ends=ends)

    def _saved_bytes(self) -> Iterator[bytes]:
        per_piece = CHUNK_BYTES // self._shard.dtype.itemsize
        whole = Span(0, self._shard.elements)
        for section in SAVED:
            for span in schedule.chunks(whole, per_piece):
                yield self._shard.read(section, span)

    # The end of a round

    def boundary(
        self, interval: Interval, dataset: Dataset, *, gives_up: Callable[[], bool]
    ) -> BoundaryReply:
        """Hands in the round's checkpoint and asks how to go on; waits for the answer.

        Raises Over when this rank `gives_up` meanwhile: it has saved by then.
        """
        loss, tokens = self._evaluated(interval, dataset)
        self._hand_in(interval.last, RoundEnd(interval.round, loss, tokens))
        self._meet(interval.last)
        while True:
            reply = self.place.talk.until(gives_up).ask(
                lambda who: BoundaryRequest(
                    identity=who,
                    group=self.place.number,
                    round=interval.round,
                    wait_seconds=BOUNDARY_SECONDS,
                )
            )
            if reply.action != "wait":
                return reply
            self.place.check()

    def _hand_in(self, step: int, ends: RoundEnd) -> None:
        """Saves the last step of a round and hands it in, as this rank's part."""
        self._save(step, ends=ends)

    def _meet(self, step: int) -> None:
        """Returns when all ranks have evaluated and saved `step`, the last one of a round."""

    def _evaluated(self, interval: Interval, dataset: Dataset) -> tuple[float, int]:
        """This rank's share of the held-out loss after the round, where it is wanted."""
        evaluate = self._loaded.evaluate
        if evaluate is None or not self._can_evaluate or not self._is_evaluated(interval, dataset):
            return 0.0, 0
        wanted, batch = range(dataset.held_out_rows), self.manifest.inner.batch
        rank, size = self.place.rank, self.place.size

        def mine() -> Iterator[tuple[Tensor, bool]]:
            for rows in batching.held_out_batches(dataset, wanted, batch=batch):
                (part,) = micro_batches.of(len(rows), rank=rank, size=size, count=1)
                yield part.rows.of(rows), part.counts

        was_training = self._loaded.model.training
        self._loaded.model.eval()
        found = self._stepping.evaluate(interval.last, mine(), evaluate)
        self._loaded.model.train(was_training)
        self._shield.check()
        return found

    def _is_evaluated(self, interval: Interval, dataset: Dataset) -> bool:
        every, stop = self.manifest.evaluate.every, self.manifest.stop
        steps = interval.last - interval.first + 1
        tokens = interval.tokens + steps * self.manifest.inner.batch * dataset.block
        is_last = interval.round == stop.rounds or 0 < stop.tokens <= tokens
        return every > 0 and (interval.round % every == 0 or is_last)

    def finish(self) -> bool:
        """Whether all that was saved is consistent; waits as long as others would for this rank."""
        return self._saving.finish(seconds=self.manifest.sharded.deadline_seconds)

    def close(self) -> None:
        """Leaves the group; what is not saved is given up."""
        self._saving.close()
        self.place.leave()
        if self._step is not None:
            self._step.engine.close()
        self._shard.close()
