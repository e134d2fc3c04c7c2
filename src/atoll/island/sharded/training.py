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
from atoll.errors import ConfigError, ProtocolError
from atoll.island.prefetch import RowPrefetch
from atoll.island.sharded import restore as restoring
from atoll.island.sharded.errands import Spawn
from atoll.island.sharded.saving import RoundEnd, Saving
from atoll.island.sharded.shield import Shield
from atoll.island.sharded.source import SaveSource
from atoll.island.sharded.watch import Place
from atoll.layout import Span
from atoll.protocol.manifest import Manifest
from atoll.protocol.sharded import BoundaryReply, BoundaryRequest, Interval, Restore
from atoll.strategies.sharded import build, micro_batches
from atoll.strategies.sharded.holding import Holding
from atoll.strategies.sharded.saves import CHUNK_BYTES, NO_NOTES, Notes, Saves
from atoll.strategies.sharded.shard import SAVED, Shard
from atoll.strategies.sharded.step import Made
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
        self._step = build.step(
            manifest, loaded.model, self._shard, self._shield, group=place.number, clock=clock
        )
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
        return wanted.step

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
        own = next(filter(None, map(self._kept.notes, wanted.parts)), None)
        told = torch.zeros(3 * self.place.size, dtype=torch.float64)
        mine = torch.zeros(3, dtype=torch.float64)
        if own is not None:
            mine = torch.tensor([1.0, own.loss_sum, float(own.tokens)], dtype=torch.float64)
        key = Key(self.place.number, 0, "control", unit=NOTES)
        self.place.peers.all_gather(key, mine, told).wait()
        for has, loss_sum, tokens in told.view(-1, 3).tolist():
            if has:
                return Notes(loss_sum, int(tokens))
        return NO_NOTES

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
    ) -> Iterator[Tensor | Made]:
        """Trains the steps of `interval` that come after `after`.

        Gives each micro-batch's rows, and what each step came to.
        """
        if after < interval.first:
            self._notes = NO_NOTES
        inner, settings = self.manifest.inner, self.manifest.sharded
        reading = {"batch": inner.batch, "seed": self.manifest.seed}
        done = max(0, after + 1 - interval.first)
        per_step = inner.batch * dataset.block
        rows = ahead.batches(interval.ranges, skip=done, **reading)
        for number, batch in enumerate(rows, start=interval.first + done):
            self.place.check()
            self.place.peers.advance(number)
            self._step.begin(number)
            parts = micro_batches.of(
                len(batch), rank=self.place.rank, size=self.place.size, count=settings.micro_batches
            )
            for part in parts:
                yield from self._micro(part.rows.of(batch), part.num_rows * dataset.block)
            tokens = interval.tokens + (number - interval.first) * per_step
            made = self._step.commit(lr=inner.lr * inner.schedule.factor(tokens))
            so_far = self._notes
            self._notes = Notes(so_far.loss_sum + made.loss_sum, so_far.tokens + made.tokens)
            yield made
            if number % settings.save_every == 0 and number != interval.last:
                self._save(number)

    def _micro(self, rows: Tensor, tokens: int) -> Iterator[Tensor]:
        self._step.begin_micro(tokens)
        self.given = given = Given(rows)
        yield rows
        self.given = None
        self._shield.check()
        if given.loss is None:
            raise ConfigError("run.step(loss=...) must be called once for every batch")
        self._step.finish_micro(given.loss)
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
        self._save(interval.last, ends=RoundEnd(interval.round, loss, tokens))
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
        found = self._step.evaluate(interval.last, mine(), evaluate)
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
        self._step.engine.close()
        self._shard.close()
