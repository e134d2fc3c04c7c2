"""A run as a training script sees it: load, batches, step.

    run = atoll.join(url, token=...)
    run.load(model, optimizer)
    for rows in run.batches(dataset):
        ...                      # forward, backward, optimizer.step()
        run.step(loss=loss)

Everything that must match comes from the coordinator; nothing of it can be set here.
"""

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.clock import Clock
from atoll.data import batches as batching
from atoll.data.base import Dataset
from atoll.errors import ConfigError
from atoll.island import collective, inner_optimizer
from atoll.island.conversation.intents import Partial, Trained
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.transfers import Transfers
from atoll.island.driver import Driver
from atoll.island.gather.base import Buckets
from atoll.island.link.base import Link
from atoll.island.participant import Participant, Spawn, in_a_thread
from atoll.island.prefetch import RowPrefetch
from atoll.island.ranks import combine
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.base import Store
from atoll.island.state.continuity import Continuity, Part
from atoll.island.state.store import IslandIdentity
from atoll.island.state.weights import IslandWeights
from atoll.models import fingerprint
from atoll.pools.adapters.base import Adapter, is_fsdp2, unwrapped
from atoll.protocol.messages import Assignment, EvaluationTask
from atoll.versions import recorded

Evaluate = Callable[[nn.Module, Tensor], tuple[float, int]]
_NOTHING = Trained(0.0, 0, 0)


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
    trained: Trained = _NOTHING
    awaits_step: bool = False  # a batch is handed out and not stepped on yet


class Run(Participant):
    """This process's part in a run of rounds. Not thread-safe, except `beat` and `attend`."""

    def __init__(
        self,
        link: Link,
        store: Store,
        clock: Clock,
        *,
        identity: IslandIdentity,
        jitter: random.Random,
        group: Group = SOLO,
        spawn: Spawn = in_a_thread,
        buckets: Buckets | None = None,
    ) -> None:
        super().__init__(link, clock, identity=identity, jitter=jitter, group=group, spawn=spawn)
        self._store = store
        self.buckets = buckets  # the leader's, where islands publish into some
        self._beside_driver = Driver(link, clock, alone=True)
        self._beside_driver.buckets = buckets
        self._session.signing = None if buckets is None else buckets.signing
        self._rounds: Rounds | None = None
        self._loaded: _Loaded | None = None
        self._round: _Round | None = None

    @property
    def version(self) -> int | None:
        """The published version this island holds."""
        return None if self._loaded is None else self._loaded.weights.version

    @property
    def digest(self) -> str | None:
        """The digest of the published weights this island holds."""
        return None if self._loaded is None else self._loaded.weights.digest

    @property
    def stale_rounds(self) -> int:
        """Rounds that closed without this island's contribution."""
        return 0 if self._rounds is None else self._rounds.stale_rounds

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
        applied to it; its gradients are then combined by the ranks' honest row counts. That they
        arrive as this sum is probed with a known gradient, once; NotSummed otherwise.
        """
        share = BatchSlice(self.group.rank, self.group.size)
        self._combine(model, share)
        self._loaded = self.group.together(lambda: self._bind(model, optimizer, evaluate, share))

    def _combine(self, model: nn.Module, share: BatchSlice) -> None:
        """Collective: gradients are combined by the ranks' rows, and seen to be."""
        ranks = self.group.size

        def install() -> Adapter | None:
            fingerprint.check(unwrapped(model), recorded.layout_of(self.manifest))
            return combine.install(model, share, ranks=ranks)

        def check() -> None:
            if adapter is not None and ranks > 1:
                with self.group.training():
                    combine.check(adapter, share, ranks=ranks)

        # All ranks have what they need before any of them waits for another's gradient.
        adapter = self.group.together(install)
        self.group.together(check)

    def _bind(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        evaluate: Evaluate | None,
        share: BatchSlice,
    ) -> _Loaded:
        layout = recorded.layout_of(self.manifest)
        adopted = self._session.adopted
        weights = IslandWeights(
            model, layout, strategy=adopted.asked, download=adopted.download, group=self.group
        )
        weights.keeper = self.buckets
        weights.recall()
        part = Part(self.group.rank, self.group.size, is_fsdp2(model))
        continuity = Continuity(
            self._store, adopted.info, worker_id=self.worker_id, elements=layout.size, part=part
        )
        continuity.start(optimizer)
        return _Loaded(model, optimizer, evaluate, weights, continuity, share)

    def batches(self, dataset: Dataset) -> Iterator[Tensor]:
        """Batches of the rows this island is given, int64 [batch, block + 1], until the run ends.

        Waits for assignments, fetches weights, and resumes what an earlier life left. In a torchrun
        group each rank gets its slice of every batch: at least one row, which may count as none.
        """
        loaded = self._must_be_loaded()
        digest, identity = loaded.weights.layout.digest, dict(dataset.identity())
        self._driver.run(self._session.register(layout_digest=digest, data_identity=identity))
        collective.check_data(self.group, self.manifest, dataset)
        self._rounds = Rounds(self._session, loaded.weights, loaded.continuity)
        with closing(RowPrefetch(dataset)) as ahead, self._transferring(self._rounds.transfers):
            self._driver.foresee = lambda rows: ahead.begin(rows.ranges, **self._reading())
            self._driver.evaluate = lambda asked: self._evaluate(loaded, dataset, asked.task)
            steps = self._rounds.take_part()
            train = self._driver.until_training(steps)
            while train is not None:
                trained = yield from self._train(loaded, dataset, train.assignment, ahead)
                train = self._driver.until_training(steps, trained)
        self.close()

    @contextmanager
    def _transferring(self, transfers: Transfers) -> Iterator[None]:
        """The leader's transfers go on beside what is done meanwhile."""
        if self.group.is_leader:
            self._beside_driver.is_over = lambda: transfers.is_closed
            drive = self._beside_driver.run
            self._spawn("sending", lambda: drive(transfers.sending()))
            self._spawn("following", lambda: drive(transfers.following()))
        try:
            yield
        finally:
            transfers.close()

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
        current.trained += done
        current.awaits_step = False
        number = current.assignment.round or 0
        self._meter.step(number, current.steps, tokens=done.tokens, loss=done.loss)
        self._samples.add(self.telemetry())

    def _must_be_loaded(self) -> _Loaded:
        if self._loaded is None:
            raise ConfigError("run.load(model) must come before run.batches(dataset)")
        return self._loaded

    def _reading(self) -> dict[str, int]:
        return {"batch": self.manifest.inner.batch, "seed": self.manifest.seed}

    def _train(
        self, loaded: _Loaded, dataset: Dataset, assignment: Assignment, ahead: RowPrefetch
    ) -> Generator[Tensor, None, Trained | None]:
        settings = self.manifest.inner
        self._round = current = _Round(assignment, dataset.block)
        per_step = settings.batch * dataset.block * assignment.num_planned
        found: Trained | None = None
        self._meter.begin()
        for rows in ahead.batches(assignment.ranges, **self._reading()):
            if loaded.optimizer is not None:
                done = assignment.global_tokens + current.steps * per_step
                inner_optimizer.set_rate(loaded.optimizer, settings, global_tokens=done)
            current.awaits_step = True
            yield loaded.share.slice(rows).to(loaded.device)
            if current.awaits_step:
                raise ConfigError("run.step(loss=...) must be called once for every batch")
            if not self._merge_due(current):
                break
        else:
            found = current.trained
        self._meter.end()
        self._round = None
        return found

    def _merge_due(self, current: _Round) -> bool:
        """Takes in what the strategy wants merged after this step; waits for it if need be.

        False when the round is given up.
        """
        assert self._rounds is not None and current.assignment.round is not None
        due = self._session.adopted.asked.due(current.assignment.round, current.steps)
        if not due:
            return True
        with self._meter.paused():  # waiting is no training
            return all(self._driver.run(self._rounds.merge(number)) for number in due)

    def _evaluate(self, loaded: _Loaded, dataset: Dataset, task: EvaluationTask) -> Partial | None:
        """This island's share of the held-out loss, over all its ranks."""
        if loaded.evaluate is None:
            return None
        loss_sum, tokens = 0.0, 0
        was_training = loaded.model.training
        loaded.model.eval()
        wanted, batch = range(task.start, task.stop), self.manifest.inner.batch
        with torch.no_grad():
            for rows in batching.held_out_batches(dataset, wanted, batch=batch):
                mine = loaded.share.slice(rows).to(loaded.device)
                loss, count = loaded.evaluate(loaded.model, mine)
                if loaded.share.rows:
                    loss_sum, tokens = loss_sum + loss, tokens + count
        loaded.model.train(was_training)
        return collective.total(self.group, loss_sum, tokens)
