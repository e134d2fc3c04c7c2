"""A sharded run as a training script sees it: load, batches, step.

    run = atoll.join(url, token=...)
    run.load(model)              # may be on the meta device; the optimizer is the run's
    for rows in run.batches(dataset):
        loss = ...               # a micro-batch of this rank
        loss.backward()
        run.step(loss=loss)

Everything that must match comes from the coordinator; nothing of it can be set here.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.clock import Clock
from atoll.data.base import Dataset
from atoll.errors import (
    AtollError,
    BlobChanged,
    BlobMissing,
    ConfigError,
    Forbidden,
    GroupBroken,
    MissingRanks,
    ProtocolError,
    StaleGeneration,
    StaleGroup,
)
from atoll.island import collective
from atoll.island.conversation.standing import Adopted
from atoll.island.driver import Over
from atoll.island.link.rank import RankLink
from atoll.island.participant import Participant, Spawn, in_a_thread
from atoll.island.prefetch import RowPrefetch
from atoll.island.sharded import forming
from atoll.island.sharded.figures import Figures, Missed
from atoll.island.sharded.host import Host
from atoll.island.sharded.leaving import Leaving
from atoll.island.sharded.quorum_training import QuorumTraining
from atoll.island.sharded.source import SaveSource
from atoll.island.sharded.talk import Talk
from atoll.island.sharded.training import Evaluate, Loaded, Training
from atoll.island.sharded.watch import Place
from atoll.island.state.store import IslandIdentity
from atoll.protocol.messages import Telemetry
from atoll.protocol.sharded import GroupReply, Interval
from atoll.strategies.sharded.quorum.rank import Reception
from atoll.strategies.sharded.saves import Saves
from atoll.strategies.sharded.step import Made
from atoll.strategies.sharded.units import Units
from atoll.versions import recorded

log = logging.getLogger(__name__)

# The group cannot go on; who is at fault is the coordinator's to say.
_GROUP_ERRORS = (MissingRanks, StaleGeneration, StaleGroup, GroupBroken, Forbidden)
# This rank cannot go on in the group: what it was to load is not there, or not right.
_OWN_ERRORS = (BlobMissing, BlobChanged, ProtocolError)


class ShardedRun(Participant):
    """This process as a rank of a sharded run. Not thread-safe, except `beat` and `attend`."""

    def __init__(
        self,
        link: RankLink,
        home: Path,
        clock: Clock,
        *,
        identity: IslandIdentity,
        jitter: random.Random,
        host: Host,
        spawn: Spawn = in_a_thread,
    ) -> None:
        self._figures = Figures(host.traffic)
        super().__init__(link, clock, identity=identity, jitter=jitter, spawn=spawn)
        self._home = home
        self._host = host
        self._talk = Talk(self._session, link, clock)
        self._kept = Saves(home / "saves", run_id=self._session.standing.info.run_id)
        self._loaded: Loaded | None = None
        self._training: Training | None = None
        self._leaving = Leaving()
        self._is_finished = False
        self.version: int | None = None  # the newest checkpoint that this rank knows to be recorded
        self.digest: str | None = None  # no rank has the whole model: the coordinator knows it
        self.steps = 0  # made by this process, rolled-back ones included

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        evaluate: Evaluate | None = None,
    ) -> None:
        """Binds the run to `model`, whose names and shapes must be the run's, in any order.

        Its parameters may be on the meta device: they get memory when they are computed with, a
        block at a time. With `evaluate` (sum of losses and tokens of some rows) this rank takes its
        share of the held-out evaluation.
        """
        if optimizer is not None:
            raise ConfigError(
                f"run.load(model, {type(optimizer).__name__}) in a run of strategy 'sharded': the "
                f"optimizer is the run's, because no rank has the whole model; call "
                f"run.load(model) and leave stepping to run.step"
            )
        units = Units.of(recorded.layout_of(self.manifest))
        self._loaded = Loaded(model, units, evaluate)

    def batches(self, dataset: Dataset) -> Iterator[Tensor]:
        """Micro-batches of this rank, int64 [rows, block + 1], until the run ends.

        Waits for a group, restores what it goes back to, and goes on with the next group when one
        ends. A rank without rows gets one that counts as none: all compute together.
        """
        loaded = self._must_be_loaded()
        self._driver.run(
            self._session.register(
                layout_digest=loaded.units.layout.digest,
                data_identity=dict(dataset.identity()),
                **asdict(self._host.endpoint),
            )
        )
        collective.check_data(self.group, self.manifest, dataset)
        with closing(RowPrefetch(dataset)) as ahead:
            while not self._is_finished and (formed := self._next_group()) is not None:
                yield from self._in_group(loaded, formed, dataset, ahead)
        self.close()

    def step(self, *, loss: float | Tensor) -> None:
        """The micro-batch's backward pass is over; `loss` is the mean over its tokens."""
        given = None if self._training is None else self._training.given
        if given is None or given.loss is not None:
            raise ConfigError(
                "run.step(loss=...) is called once for every batch of `run.batches(dataset)`"
            )
        given.loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

    def interrupt(self) -> None:
        """From a signal handler: KeyboardInterrupt once the step under way is made and saved.

        At once when none is under way, and when it is called again.
        """
        self._leaving.ask()

    def telemetry(self) -> Telemetry:
        """What this rank tells about itself."""
        return self._figures.added(super().telemetry())

    # Groups

    def _next_group(self) -> GroupReply | None:
        return forming.next_group(
            self._talk, self._host, worker_id=self.worker_id, held=lambda: self._kept.held
        )

    def _in_group(
        self, loaded: Loaded, formed: GroupReply, dataset: Dataset, ahead: RowPrefetch
    ) -> Iterator[Tensor]:
        """Trains until the group is over, for whatever reason."""
        training = self._training = self._entered(loaded, formed)
        ended_by: AtollError | None = None
        try:
            yield from self._trained(training, dataset, ahead)
        except _GROUP_ERRORS as error:
            ended_by = error
            self._given_up(formed, error)
            self._leaving.check()
            under_way = self._figures.under_way
            if self._host.outlives_groups and not training.place.await_end(error, step=under_way):
                self._talk.register_again()
        except _OWN_ERRORS as error:
            ended_by = error
            self._given_up(formed, error)
            self._leaving.check()
            if self._host.outlives_groups and not training.place.is_over:
                self._talk.register_again()
        finally:
            self._training = None
            training.close()
        if not self._is_finished and not self._host.outlives_groups:
            raise GroupBroken(
                f"group={formed.group} is over ({ended_by or 'the coordinator ended it'}), and the "
                f"processes of a torchrun launch are connected once; all end, and with "
                f"--max-restarts torchrun starts them again: they go on from what they saved"
            ) from ended_by

    def _entered(self, loaded: Loaded, formed: GroupReply) -> Training:
        rank = forming.rank_of(formed, self.worker_id)
        settings, offered = self.manifest.sharded, SaveSource(self._kept)
        reception = Reception(offered) if settings.commit == "quorum" else None
        peers = self._host.enter(
            formed, rank, source=reception or offered, desk=reception, settings=settings
        )
        place = Place(formed, rank, peers, talk=self._talk, clock=self._clock, spawn=self._spawn)
        kind: Callable[..., Training] = Training
        if reception is not None:
            kind = partial(QuorumTraining, reception=reception, lane=self._host.lane)
        return kind(
            loaded,
            place,
            manifest=self.manifest,
            kept=self._kept,
            offered=offered,
            home=self._home,
            clock=self._clock,
            spawn=self._spawn,
        )

    def _given_up(self, formed: GroupReply, error: AtollError) -> None:
        about = {"group": formed.group, "code": error.code, "reason": str(error)}
        log.warning("a step is given up", extra=about)

    def _trained(
        self, training: Training, dataset: Dataset, ahead: RowPrefetch
    ) -> Iterator[Tensor]:
        step = training.restore()
        self._figures.went_back_to(step, group=training.place.number)
        with self._leaving.needed():
            yield from self._stepped(training, step, dataset, ahead)

    def _stepped(
        self, training: Training, step: int, dataset: Dataset, ahead: RowPrefetch
    ) -> Iterator[Tensor]:
        """The micro-batches of all steps after `step`, to the group's end."""
        planned = training.place.formed.intervals
        # A round whose last step is made, but whose checkpoint is not there, is handed in first.
        ended = next((i for i in planned if i.last == step), None)
        if ended is not None:
            interval = self._after(training, ended, dataset)
        else:
            interval = _containing(planned, step + 1)
        while interval is not None:
            self._adopt(training, interval)
            yield from self._measured(training, interval, step, dataset, ahead)
            step = interval.last
            interval = self._after(training, interval, dataset)

    def _after(self, training: Training, ended: Interval, dataset: Dataset) -> Interval | None:
        """The next interval of this group; None when it has none."""
        try:
            reply = training.boundary(ended, dataset, gives_up=lambda: self._leaving.is_asked)
        except Over:
            self._finish(training)
        self._is_finished = reply.action == "stop"
        self.version = ended.round - (reply.action == "go")
        return reply.interval

    def _measured(
        self,
        training: Training,
        interval: Interval,
        after: int,
        dataset: Dataset,
        ahead: RowPrefetch,
    ) -> Iterator[Tensor]:
        """The micro-batches of an interval; what its steps came to is told to operators."""
        self._meter.begin()
        is_between = True
        for found in training.steps(interval, after, dataset, ahead):
            if is_between and self._leaving.is_asked:
                self._finish(training)
            is_between = isinstance(found, Made | Missed)
            if isinstance(found, Made):
                self.steps += 1
                self._figures.made(found.step, found.seconds)
                self._told(interval.round, found, training.place.size)
            elif isinstance(found, Missed):
                self._figures.missed(found)
            else:
                yield found
        self._meter.end()

    def _finish(self, training: Training) -> NoReturn:
        """Between two steps: sees to it that what is saved is of use to the others, and goes."""
        is_whole = training.finish()
        log.info("asked to leave", extra={"group": training.place.number, "saved": is_whole})
        raise KeyboardInterrupt

    def _told(self, number: int, made: Made, ranks: int) -> None:
        # Each rank's even share of the tokens: what it computed itself differs by a row.
        tokens = made.tokens // ranks
        loss = made.loss_sum / made.tokens if made.tokens else math.nan
        self._meter.step(number, made.step, tokens=tokens, loss=loss)
        self._samples.add(self.telemetry())

    def _adopt(self, training: Training, interval: Interval) -> None:
        """Takes over the settings that the interval is under."""
        if interval.manifest_sha256 != self._session.adopted.info.manifest_sha256:
            info = self._driver.run(self._session.version(interval.manifest_sha256))
            self._session.adopted = Adopted.of(info)
            training.manifest = self.manifest

    def _must_be_loaded(self) -> Loaded:
        if self._loaded is None:
            raise ConfigError("run.load(model) must come before run.batches(dataset)")
        return self._loaded


def _containing(planned: Sequence[Interval], step: int) -> Interval:
    found = next((i for i in planned if i.first <= step <= i.last), None)
    if found is None:
        told = [(i.first, i.last) for i in planned]
        raise ProtocolError(
            f"step={step} comes next, and the coordinator planned steps {told}; run the same "
            f"release of atoll on both sides"
        )
    return found
