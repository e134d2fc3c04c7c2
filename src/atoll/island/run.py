"""A run as a training script sees it: load, batches, step.

    run = atoll.join(url, token=...)
    run.load(model, optimizer=optimizer)
    for rows in run.batches(dataset):
        ...                      # forward, backward, optimizer.step()
        run.step(loss=loss)

Everything that must match comes from the coordinator; nothing of it can be set here.
"""

import logging
import math
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.clock import Clock
from atoll.codecs import feedback
from atoll.data import batches as batching
from atoll.data.base import Dataset
from atoll.data.plan import Range
from atoll.errors import (
    ConfigError,
    Conflict,
    FrameError,
    LeaseLost,
    StaleContribution,
    UnknownWorker,
    WrongBase,
    WrongRound,
)
from atoll.island import contribution, inner, inner_state
from atoll.island.link import DownloadProgress, Link
from atoll.island.reconnect import Reconnect
from atoll.island.store import IslandIdentity, IslandStore, Saved
from atoll.island.weights import IslandWeights
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    EvaluationTask,
    HeartbeatRequest,
    Identity,
    Info,
    RegisterRequest,
    Telemetry,
)
from atoll.strategies import build
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)

WAIT_SECONDS = 20.0  # a long poll; well below any proxy's idle limit

Evaluate = Callable[[nn.Module, Tensor], tuple[float, int]]


@dataclass
class _Round:
    """Training of one round under way."""

    assignment: Assignment
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    loss_sum: float = 0.0


class Run:
    """This process's part in a run. Not thread-safe, except `beat`."""

    def __init__(
        self,
        link: Link,
        store: IslandStore,
        clock: Clock,
        *,
        identity: IslandIdentity,
        jitter: random.Random,
        hash_threads: int = 1,
    ) -> None:
        self._link = link
        self._store = store
        self._clock = clock
        self._island = identity
        self._hash_threads = hash_threads
        self._reconnect = Reconnect(clock, jitter)
        self._info: Info = self._reconnect.call(link.info)
        self.manifest: Manifest = self._info.manifest()
        self._codec = build.codec(self.manifest.upload)
        self._incarnation = 0
        self._weights: IslandWeights | None = None
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._evaluate: Evaluate | None = None
        self._residual: Tensor | None = None
        self._round: _Round | None = None
        self._dataset: Dataset | None = None
        self._telemetry = Telemetry()
        self._train_seconds = 0.0
        self._round_began = 0.0
        self._tokens = 0
        self.stale_rounds = 0
        log.info("settings adopted from the coordinator", extra={"manifest": self.manifest.body()})

    @property
    def worker_id(self) -> str:
        """Who this island is in the run."""
        return self._island.worker_id

    @property
    def version(self) -> int | None:
        """The published version this island holds."""
        return None if self._weights is None else self._weights.version

    @property
    def digest(self) -> str | None:
        """The digest of the published weights this island holds."""
        return None if self._weights is None else self._weights.digest

    # The script's three calls

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        evaluate: Evaluate | None = None,
    ) -> None:
        """Binds the run to `model`, whose names, shapes and dtypes must be the run's.

        The parameters' storage is replaced by views of one flat buffer and filled with the run's
        weights before the first batch. With `optimizer` its state is checkpointed and its learning
        rate follows the manifest's schedule; with `evaluate` (sum of losses and tokens of some
        rows) this island takes its share of the held-out evaluation.
        """
        self._model, self._optimizer, self._evaluate = model, optimizer, evaluate
        self._weights = IslandWeights(
            model, download=build.codec(self.manifest.download), hash_threads=self._hash_threads
        )
        if self._weights.layout.digest != self.manifest.model.layout_digest:
            from atoll.models import registry as models

            run_layout = models.layout_of(models.on_meta(self.manifest.model.definition))
            run_layout.check(dict(model.named_parameters()))
        self._fresh_inner()

    def batches(self, dataset: Dataset) -> Iterator[Tensor]:
        """Batches of the rows this island is given, int64 [batch, block + 1], until the run ends.

        Waits for assignments, fetches weights, and resumes what an earlier life left.
        """
        if self._weights is None:
            raise ConfigError("run.load(model) must come before run.batches(dataset)")
        self._dataset = dataset
        self._register()
        self._resume()
        while (assignment := self._next_assignment()) is not None:
            self._begin(assignment)
            ranges = [Range(r.start, r.stop) for r in assignment.ranges]
            for rows in batching.batches(
                dataset, ranges, batch=self.manifest.inner.batch, seed=self.manifest.seed
            ):
                done = self._round.steps if self._round is not None else 0
                self._set_rate(done)
                self._pending_rows = rows
                yield rows.to(self._device())
                if self._round is None or self._round.steps != done + 1:
                    raise ConfigError(
                        "run.step(loss=...) must be called exactly once for every batch"
                    )
            self._sync()
        self.close()

    def step(self, *, loss: float | Tensor) -> None:
        """Counts one inner step; `loss` is the mean over the batch's tokens."""
        if self._round is None:
            raise ConfigError("run.step(loss=...) is called inside `for rows in run.batches(...)`")
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        rows = self._pending_rows
        tokens = rows.shape[0] * (rows.shape[1] - 1)
        self._round.steps += 1
        self._round.rows += rows.shape[0]
        self._round.tokens += tokens
        self._round.loss_sum += value * tokens
        self._tokens += tokens
        self._tell(value)

    def close(self) -> None:
        """Leaves the run."""
        if self._incarnation:
            self._call(lambda: self._link.leave(self._identity()))
            self._incarnation = 0

    # Rounds

    def _begin(self, assignment: Assignment) -> None:
        self._round = _Round(assignment)
        self._round_began = self._clock.now()

    def _sync(self) -> None:
        """Encode, persist, upload; then the checkpoint or the rollback."""
        assert self._round is not None and self._weights is not None
        done = self._round
        self._train_seconds += self._clock.now() - self._round_began
        self._round = None
        assert done.assignment.round is not None
        header = self._header(done)
        path = self._store.begin(header.round)
        with (path / "frame").open("wb") as file:
            encoded = contribution.encode(
                self._weights,
                header,
                file.write,
                codec=self._codec,
                residual=self._residual,
                noise=build.upload_noise(self.manifest, header.round, self.worker_id),
            )
        meta, tensors = self._inner_tensors(encoded.residual)
        meta |= {"preamble": encoded.preamble.hex(), "sha256": encoded.sha256}
        meta |= {"run_id": self._info.run_id, "manifest_sha256": self._info.manifest_sha256}
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(self._store.complete, path, meta, tensors)
            frame = self._store.frame(Saved(header.round, meta, {}))
            try:
                # The frame travels while it is being synced here; only the commit waits for that.
                accepted = self._send(frame, before_commit=lambda: saving.result())
            finally:
                frame.close()
                saving.result()
        if accepted:
            self._residual = encoded.residual
            self._store.promote(header.round)
        else:
            self._roll_back()

    def _send(self, frame: Any, *, before_commit: Callable[[], None]) -> bool:
        """Whether the coordinator has the contribution; False when its round is over."""
        try:
            receipt = self._call(
                lambda: self._link.upload(self._identity(), frame, before_commit=before_commit)
            )
        except (StaleContribution, Conflict, LeaseLost, WrongBase, WrongRound) as error:
            self.stale_rounds += 1
            log.warning(
                "contribution refused, its rows go to a later round",
                extra={"code": error.code, "reason": str(error)},
            )
            return False
        log.info("contribution accepted", extra={"receipt": receipt})
        return True

    def _header(self, done: _Round) -> FrameHeader:
        assert self._weights is not None and done.assignment.round is not None
        return FrameHeader.of(
            self._weights.layout,
            self._codec,
            kind="contribution",
            run_id=self._info.run_id,
            manifest_sha256=self._info.manifest_sha256,
            round=done.assignment.round,
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            base_digest=done.assignment.digest,
            weight=1 if self.manifest.weighting == "equal" else done.tokens,
            rows=done.rows,
            tokens=done.tokens,
            loss_sum=done.loss_sum,
            ranges=[(r.start, r.stop) for r in done.assignment.ranges],
        )

    def _next_assignment(self) -> Assignment | None:
        """The next rows to train; None when the run is finished."""
        assert self._weights is not None
        while True:
            reply: Assignment = self._call(self._ask)
            if reply.action == "fetch":
                self._fetch()
                continue
            if reply.evaluation is not None:
                self._evaluate_share(reply.evaluation)
            if reply.action == "stop":
                log.info("run finished", extra={"version": reply.version, "digest": reply.digest})
                return None
            if reply.action == "train":
                self._weights.reset()
                return reply

    def _ask(self) -> Assignment:
        assert self._weights is not None
        return self._link.assignment(
            AssignmentRequest(
                identity=self._identity(),
                version=self._weights.version,
                digest=self._weights.digest,
                wait_seconds=WAIT_SECONDS,
            )
        )

    def _fetch(self) -> None:
        assert self._weights is not None
        while not self._try_fetch(self._weights):
            self._weights.forget()

    def _try_fetch(self, weights: IslandWeights) -> bool:
        receiver, progress = weights.receive(), DownloadProgress()
        have_digest = weights.digest or ""

        def download() -> None:
            self._link.download(
                self._identity(), have_digest=have_digest, progress=progress, sink=receiver.feed
            )

        try:
            self._call(download)
            receiver.finish()
        except FrameError as error:
            log.warning("download refused, fetching whole", extra={"reason": str(error)})
            return False
        return True

    def _evaluate_share(self, task: EvaluationTask) -> None:
        if self._evaluate is None or self._dataset is None or self._model is None:
            return
        loss_sum, tokens = 0.0, 0
        self._model.eval()
        with torch.no_grad():
            for rows in batching.held_out_batches(
                self._dataset, range(task.start, task.stop), batch=self.manifest.inner.batch
            ):
                loss, count = self._evaluate(self._model, rows.to(self._device()))
                loss_sum, tokens = loss_sum + loss, tokens + count
        self._model.train()
        if tokens and math.isfinite(loss_sum):
            self._call(
                lambda: self._link.evaluation(
                    EvaluationReport(
                        identity=self._identity(),
                        version=task.version,
                        loss_sum=loss_sum,
                        tokens=tokens,
                    )
                )
            )

    # Inner state

    def _inner_tensors(self, residual: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = inner_state.random_state()
        numbers: dict[str, Any] = {}
        if self._optimizer is not None:
            state, numbers = inner_state.flatten(self._optimizer)
            tensors |= state
        if residual is not None:
            tensors["residual"] = residual
        return {"numbers": numbers}, tensors

    def _fresh_inner(self) -> None:
        """A newcomer's inner state: nothing learned, its own random stream."""
        if self.manifest.upload.error_feedback and self._weights is not None:
            self._residual = feedback.new_residual(self._codec, self._weights.layout.size)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        seed = random.Random(f"{self.manifest.seed}/{self.worker_id}").getrandbits(63)
        torch.manual_seed(seed)

    def _adopt(self, saved: Saved) -> None:
        if self._optimizer is not None:
            inner_state.restore(self._optimizer, saved.tensors, saved.meta["numbers"])
        inner_state.set_random_state(saved.tensors)
        if self._residual is not None and "residual" in saved.tensors:
            self._residual = saved.tensors["residual"]

    def _roll_back(self) -> None:
        """The round did not count: inner state returns to the last accepted one."""
        self._store.discard_pending()
        saved = self._store.checkpoint()
        self._fresh_inner()
        if saved is not None:
            self._adopt(saved)

    def _resume(self) -> None:
        """Takes up what an earlier life left: resends a pending frame, adopts the inner state."""
        saved = self._store.checkpoint()
        pending = self._store.pending()
        if any(s is not None and s.meta["run_id"] != self._info.run_id for s in (saved, pending)):
            log.warning("the island's state belongs to another run and is dropped")
            self._store.forget()
            saved = pending = None
        if saved is not None:
            self._adopt(saved)
        if pending is None:
            return
        frame = self._store.frame(pending)
        try:
            accepted = self._send(frame, before_commit=lambda: None)
        finally:
            frame.close()
        if accepted:
            self._adopt(pending)
            self._store.promote(pending.round)
        else:
            self._store.discard_pending()

    # Calls

    def _identity(self) -> Identity:
        return Identity(
            run_id=self._info.run_id,
            manifest_sha256=self._info.manifest_sha256,
            worker_id=self._island.worker_id,
            incarnation=self._incarnation,
            island_key=self._island.island_key,
        )

    def _register(self) -> None:
        assert self._weights is not None and self._dataset is not None
        request = RegisterRequest(
            run_id=self._info.run_id,
            manifest_sha256=self._info.manifest_sha256,
            worker_id=self._island.worker_id,
            island_key=self._island.island_key,
            hostname=socket.gethostname()[:255],
            layout_digest=self._weights.layout.digest,
            data_identity=dict(self._dataset.identity()),
        )
        reply = self._reconnect.call(lambda: self._link.register(request))
        self._incarnation = reply.incarnation
        log.info(
            "registered",
            extra={"worker": self.worker_id, "incarnation": reply.incarnation},
        )

    def _call(self, work: Callable[[], Any]) -> Any:
        """Repeats `work` while the coordinator is away; registers again when it forgot us."""
        while True:
            try:
                return self._reconnect.call(work)
            except UnknownWorker:
                log.warning("the coordinator does not know this island, registering again")
                self._register()

    def beat(self) -> None:
        """One heartbeat; called from a thread of its own."""
        if self._incarnation:
            telemetry = self._telemetry.model_copy(
                update={
                    "bytes_sent": self._link.bytes_sent,
                    "bytes_received": self._link.bytes_received,
                }
            )
            self._link.heartbeat(HeartbeatRequest(identity=self._identity(), telemetry=telemetry))

    def _tell(self, loss: float) -> None:
        assert self._round is not None
        seconds = self._train_seconds + self._clock.now() - self._round_began
        self._telemetry = Telemetry(
            round=self._round.assignment.round or 0,
            step=self._round.steps,
            tokens=self._tokens,
            tokens_per_second=self._tokens / seconds if seconds > 0 else 0.0,
            loss=loss if math.isfinite(loss) else None,
        )

    def _set_rate(self, steps_done: int) -> None:
        if self._optimizer is None or self._round is None or self._dataset is None:
            return
        assignment = self._round.assignment
        per_step = self.manifest.inner.batch * self._dataset.block * assignment.num_planned
        inner.set_rate(
            self._optimizer,
            self.manifest.inner,
            global_tokens=assignment.global_tokens + steps_done * per_step,
        )

    def _device(self) -> torch.device:
        assert self._model is not None
        return next(self._model.parameters()).device
