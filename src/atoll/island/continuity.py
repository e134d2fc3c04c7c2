"""What makes a restarted island continue as if it had paused.

Inner optimizer, random state and error-feedback residual, saved with every contribution: pending
until its receipt, then the checkpoint. A refusal goes back to the last checkpoint.
"""

import logging
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.codecs import feedback
from atoll.codecs.base import Codec
from atoll.island import inner_state
from atoll.island.contribution import Feedback
from atoll.island.store import FRAME_FILE, RESIDUAL_FILE, IslandStore, Saved, StoredFrame
from atoll.layout import byte_view
from atoll.protocol.messages import Info

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InnerState:
    """What is saved of the optimizer and the random state."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


class Continuity:
    """The inner state of one island and its copies on disk."""

    def __init__(
        self, store: IslandStore, info: Info, *, worker_id: str, codec: Codec, elements: int
    ) -> None:
        self._store = store
        self._info = info
        self._worker_id = worker_id
        self._codec = codec
        self._elements = elements
        self._optimizer: Optimizer | None = None
        # bf16, what rounding lost of earlier contributions; and the one after the round under way
        self._residual: Tensor | None = None
        self._next_residual: Tensor | None = None

    def start(self, optimizer: Optimizer | None) -> None:
        """A newcomer's inner state: nothing learned, its own random stream."""
        self._optimizer = optimizer
        if optimizer is not None:
            optimizer.state.clear()
        if self._info.upload.error_feedback:
            self._residual = feedback.new_residual(self._codec, self._elements)
            self._next_residual = feedback.new_residual(self._codec, self._elements)
        seed = random.Random(f"{self._info.seed}/{self._worker_id}").getrandbits(63)
        torch.manual_seed(seed)

    def adopt(self, info: Info, codec: Codec) -> None:
        """Another manifest version from here on: what rounding lost is kept while it can be used.

        A codec that drops nothing carries nothing, so its residual ends.
        """
        self._info, self._codec = info, codec
        kept = self._residual
        self._residual = self._next_residual = None
        if info.upload.error_feedback and not codec.lossless:
            self._residual = feedback.new_residual(codec, self._elements) if kept is None else kept
            self._next_residual = feedback.new_residual(codec, self._elements)

    def resume(self, *, version: int) -> Saved | None:
        """Adopts an earlier life's checkpoint; returns a round that still waits for its receipt.

        `version` is the coordinator's. State of another run, or of rounds that a coordinator
        restored from an older copy has not come to, is of another history and is dropped.
        """
        saved, pending = self._store.checkpoint(), self._store.pending()
        found = [s for s in (saved, pending) if s is not None]
        if any(s.meta["run_id"] != self._info.run_id or s.round > version + 1 for s in found):
            log.warning("the island's state belongs to another history and is dropped")
            self._store.forget()
            return None
        if saved is not None:
            self._adopt(saved)
        return pending

    def begin(self, round_number: int) -> Path:
        """Where the frame of a round and the state that goes with it are to be written."""
        return self._store.begin(round_number)

    def writing(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """The file that the frame goes to."""
        return self._store.writing(path / FRAME_FILE)

    def describe(self, preamble: bytes, sha256: str) -> dict[str, Any]:
        """What is written beside a frame, so that another life can resend it."""
        return {
            "preamble": preamble.hex(),
            "sha256": sha256,
            "run_id": self._info.run_id,
            "residual": self._residual is not None,
        }

    @contextmanager
    def feedback(self, path: Path) -> Iterator[Feedback | None]:
        """The residual before and after a round, the latter written beside its frame."""
        if self._residual is None or self._next_residual is None:
            yield None
            return
        with self._store.writing(path / RESIDUAL_FILE) as file:
            yield Feedback(self._residual, self._next_residual, file.write)

    def capture(self) -> InnerState:
        """The inner state now, by reference: it must be saved before the next step."""
        tensors = inner_state.random_state()
        numbers: dict[str, Any] = {}
        if self._optimizer is not None:
            state, numbers = inner_state.flatten(self._optimizer)
            tensors |= state
        return InnerState(tensors, numbers)

    def save(self, path: Path, frame: dict[str, Any], captured: InnerState) -> None:
        """Makes frame, residual and inner state durable, still pending; from any thread."""
        self._store.complete(path, {**frame, "numbers": captured.numbers}, captured.tensors)

    def frame(self, round_number: int, described: dict[str, Any]) -> StoredFrame:
        """The frame of a pending round."""
        return self._store.frame(Saved(round_number, described, {}))

    def promote(self, round_number: int) -> None:
        """The receipt is here: pending becomes the checkpoint."""
        self._residual, self._next_residual = self._next_residual, self._residual
        self._store.promote(round_number)

    def adopt_pending(self, pending: Saved) -> None:
        """The receipt of an earlier life's round is here: its state is ours."""
        self._adopt(pending)
        self._store.promote(pending.round)

    def roll_back(self) -> None:
        """The round did not count: back to the last accepted one."""
        self._store.discard_pending()
        saved = self._store.checkpoint()
        self.start(self._optimizer)
        if saved is not None:
            self._adopt(saved)

    def _adopt(self, saved: Saved) -> None:
        if self._optimizer is not None:
            inner_state.restore(self._optimizer, saved.tensors, saved.meta["numbers"])
        inner_state.set_random_state(saved.tensors)
        # Saved under a manifest version without error feedback, it has none.
        if self._residual is not None and saved.meta.get("residual", True):
            self._store.read_raw(saved, RESIDUAL_FILE, byte_view(self._residual))
