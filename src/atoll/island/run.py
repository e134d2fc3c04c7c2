"""A run as a training script sees it: load, batches, step.

    run = atoll.join(url, token=...)
    run.load(model, optimizer)
    for rows in run.batches(dataset):
        ...                      # forward, backward, optimizer.step()
        run.step(loss=loss)

Everything that must match comes from the coordinator; nothing of it can be set here.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.clock import Clock
from atoll.data import batches as batching
from atoll.data.base import Dataset
from atoll.errors import (
    AtollError,
    ConfigError,
    ContributionError,
    ManifestMismatch,
    StoreError,
    WrongRound,
)
from atoll.island import collective, hand_in, inner_optimizer
from atoll.island.link.base import Attendance, Link
from atoll.island.link.reconnect import Reconnect
from atoll.island.link.session import Session
from atoll.island.prefetch import RowPrefetch
from atoll.island.ranks import combine
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.continuity import Continuity, Part
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.island.state.weights import IslandWeights
from atoll.island.telemetry import Meter, Samples
from atoll.models import fingerprint
from atoll.protocol.control import Command
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    EvaluationTask,
    HeartbeatRequest,
    Identity,
    Telemetry,
)
from atoll.protocol.samples import SamplesRequest
from atoll.strategies import build
from atoll.versions import recorded
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SECONDS = 20.0  # a long poll; well below any proxy's idle limit
MAX_BEATS = 2  # one tells of a new command, the next acknowledges it; a still newer one waits
MAX_DELIVERIES = 4  # batches of samples with one heartbeat, so that a backlog cannot delay the next

Evaluate = Callable[[nn.Module, Tensor], tuple[float, int]]


@dataclass(frozen=True)
class _Loaded:
    """What `load` binds together."""

    model: nn.Module
    optimizer: Optimizer | None
    evaluate: Evaluate | None
    weights: IslandWeights
    continuity: Continuity
    share: BatchSlice

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass
class _Round:
    """Training of one round under way."""

    assignment: Assignment
    row_tokens: int
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    awaits_step: bool = False  # a batch is handed out and not stepped on yet


class Run:
    """This process's part in a run. Not thread-safe, except `beat` and `attend`."""

    def __init__(
        self,
        link: Link,
        store: IslandStore,
        clock: Clock,
        *,
        identity: IslandIdentity,
        jitter: random.Random,
        group: Group = SOLO,
    ) -> None:
        self.group = group
        self._store = store
        reconnect = Reconnect(clock, jitter)
        self._session = Session(link, identity, reconnect, group=group)
        self._beats_under: str | None = None
        self._info = self._session.info  # what the round under way is trained under
        self.manifest: Manifest = self._info.manifest()
        self.stale_rounds = 0
        self._codec = self.manifest.upload.build()
        self._loaded: _Loaded | None = None
        self._round: _Round | None = None
        self._meter = Meter(clock)
        self._samples = Samples(clock)
        self._samples_life = 0  # the incarnation of the first delivery: it outlives evictions
        self._command = Command()
        self._on_close: tuple[Callable[[], None], ...] = ()
        log.info("settings adopted from the coordinator", extra={"manifest": self.manifest.body()})

    @property
    def worker_id(self) -> str:
        """Who this island is in the run."""
        return self._session.island.worker_id

    @property
    def version(self) -> int | None:
        """The published version this island holds."""
        return None if self._loaded is None else self._loaded.weights.version

    @property
    def digest(self) -> str | None:
        """The digest of the published weights this island holds."""
        return None if self._loaded is None else self._loaded.weights.digest

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        evaluate: Evaluate | None = None,
    ) -> None:
        """Binds the run to `model`, whose names, shapes and dtypes must be the run's, in any order.

        The parameters' storage is replaced by views of one flat buffer and filled with the run's
        weights before the first batch. With `optimizer` its state is checkpointed and its learning
        rate follows the manifest's schedule; with `evaluate` (sum of losses and tokens of some
        rows) this island takes its share of the held-out evaluation.

        In a torchrun group `model` is wrapped in DistributedDataParallel, or had fully_shard
        applied to it; its gradients are then combined by the ranks' honest row counts.
        """
        self._loaded = self.group.together(lambda: self._bind(model, optimizer, evaluate))

    def _bind(
        self, model: nn.Module, optimizer: Optimizer | None, evaluate: Evaluate | None
    ) -> _Loaded:
        layout = recorded.layout_of(self.manifest)
        fingerprint.check(combine.unwrapped(model), layout)
        share = BatchSlice(self.group.rank, self.group.size)
        combine.install(model, share, ranks=self.group.size)
        download = self.manifest.download.build()
        weights = IslandWeights(model, layout, download=download, group=self.group)
        continuity = Continuity(
            self._store,
            self._session.info,
            worker_id=self.worker_id,
            codec=self._codec,
            elements=layout.size,
            part=Part(self.group.rank, self.group.size, combine.is_fsdp2(model)),
        )
        continuity.start(optimizer)
        return _Loaded(model, optimizer, evaluate, weights, continuity, share)

    def batches(self, dataset: Dataset) -> Iterator[Tensor]:
        """Batches of the rows this island is given, int64 [batch, block + 1], until the run ends.

        Waits for assignments, fetches weights, and resumes what an earlier life left. In a torchrun
        group each rank gets its slice of every batch: at least one row, which may count as none.
        """
        loaded = self._must_be_loaded()
        self._session.register(
            layout_digest=loaded.weights.layout.digest, data_identity=dict(dataset.identity())
        )
        collective.check_data(self.group, self.manifest, dataset)
        collective.resume(self.group, self._session, loaded.continuity)
        with closing(RowPrefetch(dataset)) as ahead:
            while (assignment := self._next_assignment(loaded, dataset, ahead)) is not None:
                yield from self._train(loaded, dataset, assignment, ahead)
                self._sync(loaded)
        self.close()

    def step(self, *, loss: float | Tensor) -> None:
        """Counts one inner step; `loss` is the mean over the tokens this rank was given."""
        current = self._round
        if current is None or not current.awaits_step:
            raise ConfigError(
                "run.step(loss=...) is called once for every batch of `run.batches(dataset)`"
            )
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        share = self._must_be_loaded().share
        done = collective.step(self.group, share, loss=value, row_tokens=current.row_tokens)
        current.steps += 1
        current.rows += done.rows
        current.tokens += done.tokens
        current.loss_sum += done.loss_sum
        current.awaits_step = False
        self._meter.step(
            current.assignment.round or 0, current.steps, tokens=done.tokens, loss=done.loss
        )
        self._samples.add(self.telemetry())

    def close(self) -> None:
        """Leaves the run and lets go of what it holds; harmless when repeated."""
        self._session.leave()
        self.release()

    def leave_now(self) -> None:
        """Tells the coordinator once that this island goes; says nothing when it is away."""
        if not self.group.is_leader:
            return
        try:
            with self.group.alone():
                self._session.leave_once()
        except AtollError as error:
            log.warning("left without a word", extra={"code": error.code, "reason": str(error)})

    def release(self) -> None:
        """Lets go without a word to the coordinator, as a crash does; this island may come back."""
        callbacks, self._on_close = self._on_close, ()
        for callback in callbacks:
            callback()

    def on_close(self, *callbacks: Callable[[], None]) -> None:
        """What to call, in this order, when the run is closed or released."""
        self._on_close = callbacks

    def beat(self) -> None:
        """One heartbeat; called from a thread of its own."""
        if self._session.is_registered:
            self._beside(self._beat)

    def attend(self) -> Attendance | None:
        """Opens the presence stream, from a thread of its own; None before and after the run."""
        if not self._session.is_registered:
            return None
        return self._beside(self._session.link.attend)

    def _beside(self, work: Callable[[Identity], T]) -> T:
        """One try of `work` beside the training, under the manifest that is in force now.

        A new version is taken over between two rounds; until then only what goes on beside the
        training knows of it, so that a long step is not taken for a death.
        """

        def try_once() -> T:
            return work(self._session.identity(self._beats_under))

        try:
            return self._session.try_once(try_once)
        except ManifestMismatch:
            self._beats_under = self._session.look()
            return self._session.try_once(try_once)

    def _beat(self, identity: Identity) -> None:
        for _ in range(MAX_BEATS):
            reply = self._session.link.send(
                HeartbeatRequest(
                    identity=identity, telemetry=self.telemetry(), acknowledged=self._command.number
                )
            )
            self._session.generation = reply.generation
            if reply.command == self._command:
                break
            self._command = reply.command
            log.info("the operator asks", extra={"action": reply.command.action})
            identity = self._session.identity(self._beats_under)
        self._deliver_samples(identity)

    def _deliver_samples(self, identity: Identity) -> None:
        """Hands in what was measured; what a missed call leaves is sent with a later beat."""
        self._samples_life = self._samples_life or identity.incarnation
        for _ in range(MAX_DELIVERIES):
            batch = self._samples.batch()
            if not batch:
                return
            try:
                self._session.link.send(
                    SamplesRequest(identity=identity, life=self._samples_life, samples=batch)
                )
            except StoreError as error:
                # The beat before it was heard; only figures wait.
                log.warning("telemetry waits", extra={"code": error.code, "reason": str(error)})
                return
            self._samples.delivered(batch[-1].sequence)

    def telemetry(self) -> Telemetry:
        """What this island tells about itself."""
        traffic = self._session.link.traffic
        return self._meter.telemetry(bytes_sent=traffic.sent, bytes_received=traffic.received)

    def _must_be_loaded(self) -> _Loaded:
        if self._loaded is None:
            raise ConfigError("run.load(model) must come before run.batches(dataset)")
        return self._loaded

    def _next_assignment(
        self, loaded: _Loaded, dataset: Dataset, ahead: RowPrefetch
    ) -> Assignment | None:
        """The next rows to train, from the published weights; None when the run is over."""
        while True:
            reply = self._session.call(lambda: self._ask(loaded.weights, ahead.round))
            if reply.upcoming > ahead.round:
                ahead.round = reply.upcoming
                ahead.begin(reply.upcoming_ranges, **self._reading())
            if reply.action == "fetch":
                collective.fetch(self.group, self._session, loaded.weights)
                continue
            loaded.weights.reset()
            if reply.evaluation is not None:
                self._evaluate(loaded, dataset, reply.evaluation)
            if reply.action == "stop":
                log.info(
                    "stopped",
                    extra={
                        "reason": reply.reason,
                        "version": reply.version,
                        "digest": reply.digest,
                    },
                )
                return None
            if reply.action == "train":
                if not self._adopt(loaded, reply):
                    continue
                loaded.weights.train()
                return reply

    def _adopt(self, loaded: _Loaded, assignment: Assignment) -> bool:
        """Takes over the manifest that the round is under; False when this island must ask again.

        The one place where settings change: between two rounds.
        """
        newest = self._session.info.manifest_sha256
        unknown = assignment.manifest_sha256 not in (None, newest)
        # All ranks ask again when one must: the leader may have heard of it while it sent.
        if any(one for (one,) in self.group.gather([unknown])):
            self._session.call(self._session.refresh)
            return False
        info = self._session.info
        if info.manifest_sha256 == self._info.manifest_sha256:
            return True
        self._info, self.manifest = info, info.manifest()
        self._codec = self.manifest.upload.build()
        loaded.weights.download = self.manifest.download.build()
        loaded.continuity.adopt(info, self._codec)
        log.info("settings adopted from the coordinator", extra={"manifest": self.manifest.body()})
        return True

    def _ask(self, weights: IslandWeights, upcoming: int) -> Assignment:
        reply = self._session.link.send(
            AssignmentRequest(
                identity=self._session.identity(),
                version=weights.version,
                digest=weights.digest,
                wait_seconds=WAIT_SECONDS,
                upcoming=upcoming,
            )
        )
        self._session.generation = reply.generation
        return reply

    def _reading(self) -> dict[str, int]:
        return {"batch": self.manifest.inner.batch, "seed": self.manifest.seed}

    def _train(
        self, loaded: _Loaded, dataset: Dataset, assignment: Assignment, ahead: RowPrefetch
    ) -> Iterator[Tensor]:
        settings = self.manifest.inner
        self._round = current = _Round(assignment, dataset.block)
        per_step = settings.batch * dataset.block * assignment.num_planned
        self._meter.begin()
        for rows in ahead.batches(assignment.ranges, **self._reading()):
            if loaded.optimizer is not None:
                done = assignment.global_tokens + current.steps * per_step
                inner_optimizer.set_rate(loaded.optimizer, settings, global_tokens=done)
            current.awaits_step = True
            yield loaded.share.slice(rows).to(loaded.device)
            if current.awaits_step:
                raise ConfigError("run.step(loss=...) must be called once for every batch")
        self._meter.end()

    def _sync(self, loaded: _Loaded) -> None:
        assert self._round is not None
        header = self._header(loaded.weights, self._round)
        loaded.weights.gather()
        accepted = collective.contribute(
            self.group,
            loaded.continuity,
            header.round,
            lambda: hand_in.contribute(
                self._session,
                loaded.continuity,
                loaded.weights,
                header,
                codec=self._codec,
                noise=build.upload_noise(self.manifest, header.round, self.worker_id),
            ),
        )
        self.stale_rounds += not accepted
        self._round = None

    def _header(self, weights: IslandWeights, done: _Round) -> FrameHeader:
        assert done.assignment.round is not None
        return FrameHeader.of(
            weights.layout,
            self._codec,
            kind="contribution",
            run_id=self._info.run_id,
            manifest_sha256=self._info.manifest_sha256,
            round=done.assignment.round,
            worker_id=self.worker_id,
            incarnation=self._session.incarnation,
            base_digest=done.assignment.digest,
            weight=1 if self.manifest.weighting == "equal" else done.tokens,
            rows=done.rows,
            tokens=done.tokens,
            loss_sum=done.loss_sum,
            ranges=done.assignment.ranges,
        )

    def _evaluate(self, loaded: _Loaded, dataset: Dataset, task: EvaluationTask) -> None:
        """This island's share of the held-out loss: a partial sum with its honest count."""
        if loaded.evaluate is None:
            return
        loss_sum, tokens = 0.0, 0
        was_training = loaded.model.training
        loaded.model.eval()
        with torch.no_grad():
            for rows in batching.held_out_batches(
                dataset, range(task.start, task.stop), batch=self.manifest.inner.batch
            ):
                mine = loaded.share.slice(rows).to(loaded.device)
                loss, count = loaded.evaluate(loaded.model, mine)
                if loaded.share.rows:
                    loss_sum, tokens = loss_sum + loss, tokens + count
        loaded.model.train(was_training)
        loss_sum, tokens = collective.total(self.group, loss_sum, tokens)
        if tokens and math.isfinite(loss_sum):
            self._report(task, loss_sum, tokens)

    def _report(self, task: EvaluationTask, loss_sum: float, tokens: int) -> None:
        try:
            self._session.call(
                lambda: self._session.link.send(
                    EvaluationReport(
                        identity=self._session.identity(),
                        version=task.version,
                        loss_sum=loss_sum,
                        tokens=tokens,
                    )
                )
            )
        except (WrongRound, ContributionError) as error:
            # The coordinator went on, or restarted in between: a figure less, and no work lost.
            log.warning("evaluation refused", extra={"code": error.code, "reason": str(error)})
