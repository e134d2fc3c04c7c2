"""What makes a restarted island continue as if it had paused.

Inner optimizer, random state, error-feedback residual and, where they live on, local weights, saved
with every contribution: pending until its receipt, then the checkpoint. A refusal goes back to the
last checkpoint.
"""

import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.codecs import feedback
from atoll.island.state import optimizer_state
from atoll.island.state.base import FRAME_FILE, RESIDUAL_FILE, Frame, Saved, Store
from atoll.island.state.encoding import Feedback
from atoll.layout import byte_view
from atoll.protocol.messages import Info

log = logging.getLogger(__name__)


LOCAL_WEIGHTS = "weights/local"  # a tensor's name; whole, and saved by the leader alone


class Captured(NamedTuple):
    """What is saved of an island's training: optimizer, random state, local weights."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    course: dict[str, Any]  # where the training stands, for the conversation to go on
    spare: dict[str, Tensor] | None = None  # of the tensors, copies: free once they are saved


@dataclass(frozen=True)
class Part:
    """Which part of an island's inner state a rank has."""

    rank: int = 0
    ranks: int = 1
    is_fsdp2: bool = False

    @property
    def is_leaders(self) -> bool:
        return self.rank == 0

    def described(self) -> list[int]:
        """What is written beside a saved state: shards fit the same number of ranks only."""
        return [self.rank, self.ranks, int(self.is_fsdp2)]


WHOLE = Part()


class Continuity:
    """The inner state of one island and its copies on disk.

    What is written for a round, `begin` to `promote`, belongs to the thread that sends; `save` may
    run beside it. The rest belongs to the thread that trains, and `roll_back`, `resume` and `adopt`
    while nothing is being sent.
    """

    def __init__(
        self, store: Store, info: Info, *, worker_id: str, elements: int, part: Part = WHOLE
    ) -> None:
        self._store = store
        self._info = info
        self._worker_id = worker_id
        self._elements = elements
        self._part = part
        self._optimizer: Optimizer | None = None
        self._course: dict[str, Any] = {}
        self._local: Tensor | None = None
        # bf16, what rounding lost of earlier contributions; and the one after the round under way
        self._residual: Tensor | None = None
        self._next_residual: Tensor | None = None
        self._spares: deque[dict[str, Tensor]] = deque()  # copies that are saved, to be overwritten
        self._carried = 0  # the round whose contribution left the residual; 0: nothing was lost yet
        # What was saved under a manifest that keeps one, read back under another that keeps none:
        # rounds that were planned before may still be under the first.
        self._earlier_residual: Tensor | None = None

    def start(self, optimizer: Optimizer | None) -> None:
        """A newcomer's inner state: nothing learned, its own random stream."""
        self._optimizer = optimizer
        self._course, self._local = {}, None
        if optimizer is not None:
            optimizer.state.clear()
        self._residual, self._next_residual = self._new_residual(), self._new_residual()
        self._carried = 0
        self._earlier_residual = None
        stream = f"{self._info.seed}/{self._worker_id}"
        if not self._part.is_leaders:
            stream += f"/{self._part.rank}"
        optimizer_state.seed_random(random.Random(stream).getrandbits(63))

    def _new_residual(self) -> Tensor | None:
        """Zeros: nothing is lost yet. None for a follower, and where the settings keep none."""
        upload = self._info.upload
        if not upload.keeps_residual or not self._part.is_leaders:
            return None
        return feedback.new_residual(upload.build(), self._elements)

    def adopt(self, info: Info) -> None:
        """Goes over to another manifest version; the residual is kept if its codec uses one too.

        A codec that drops nothing carries nothing on.
        """
        self._info = info
        kept = self._earlier_residual if self._residual is None else self._residual
        self._residual, self._next_residual = self._new_residual(), self._new_residual()
        self._earlier_residual = None
        if kept is not None and self._residual is not None:
            self._residual = kept
        else:
            self._carried = 0

    def resume(self, *, version: int, lead: int) -> list[Saved]:
        """Adopts the newest state that an earlier life has saved; what still waits for a receipt.

        `version` is the coordinator's, and `lead` rounds may be open beyond the one after it. State
        of another run, or of rounds that a coordinator restored from an older copy has not come to,
        is of another history and is dropped.
        """
        kept, waiting = self._saved()
        found = [s for s in (kept, *waiting) if s is not None]
        newest = version + 1 + lead
        if any(s.meta["run_id"] != self._info.run_id or s.round > newest for s in found):
            log.warning("the island's state belongs to another history and is dropped")
        elif any(self._is_foreign(s) for s in found):
            log.warning("the island had other ranks or another sharding; its state is dropped")
        else:
            if found:
                self._adopt(found[-1])
            return waiting
        self.drop()
        return []

    def _saved(self) -> tuple[Saved | None, list[Saved]]:
        """The checkpoint, and what has no receipt yet, oldest first."""
        _, waiting = self._store.rounds()
        return self._store.checkpoint(), [self._store.pending(number) for number in waiting]

    def rounds(self) -> tuple[int | None, tuple[int, ...]]:
        """Which rounds the checkpoint and what is pending are of."""
        return self._store.rounds()

    def fall_in(self, checkpoint: int | None, waiting: Sequence[int]) -> bool:
        """Brings a follower's state to the leader's rounds; False when it has other ones.

        A follower saves before the leader sends and promotes after it, so what the leader has is
        here too, under an earlier name at most.
        """
        for number in self.rounds()[1]:
            if checkpoint is not None and number <= checkpoint:
                self._store.promote(number)
        self._store.discard_pending(after=max([*waiting, checkpoint or 0]))
        if self.rounds() != (checkpoint, tuple(waiting)):
            return False
        kept, mine = self._saved()
        found = [s for s in (kept, *mine) if s is not None]
        if any(s.meta["run_id"] != self._info.run_id or self._is_foreign(s) for s in found):
            return False
        # From here on as the leader's `resume` does.
        if found:
            self._adopt(found[-1])
        return True

    @property
    def course(self) -> dict[str, Any]:
        """Where the training of the state that was adopted stands; empty before one was."""
        return self._course

    def take_local(self) -> Tensor | None:
        """The local weights that were saved with it, once; None where none were."""
        found, self._local = self._local, None
        return found

    def drop(self) -> None:
        """Starts anew: what is on disk does not belong to this group and history."""
        self._store.forget()
        self.start(self._optimizer)

    def _is_foreign(self, saved: Saved) -> bool:
        return bool(saved.meta.get("part", WHOLE.described()) != self._part.described())

    def begin(self, round_number: int) -> Path:
        """Where the frame of a round and the state that goes with it are to be written."""
        return self._store.begin(round_number)

    def writing(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """The file that the body of the frame goes to."""
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
    def feedback(self, path: Path, round_number: int) -> Iterator[Feedback | None]:
        """The residual before and after a round, the latter written beside its frame."""
        if self._residual is None or self._next_residual is None:
            self._earlier_residual = None  # what drops nothing carries nothing on
            yield None
            return
        decay = self._info.upload.residual_decay
        with self._store.writing(path / RESIDUAL_FILE) as file:
            yield Feedback(self._residual, self._next_residual, file.write, decay, self._carried)
        # The next contribution builds on this one; a refusal reads the checkpoint's again.
        self._residual, self._next_residual = self._next_residual, self._residual
        self._carried = round_number

    def capture(
        self, *, copies: bool, course: dict[str, Any], local: Tensor | None = None
    ) -> Captured:
        """The inner state now; without `copies` by reference, to be saved before the next step."""
        tensors = optimizer_state.random_state()
        numbers: dict[str, Any] = {}
        state: dict[str, Tensor] = {}
        if self._optimizer is not None:
            state, numbers = optimizer_state.flatten(self._optimizer)
        if local is not None:
            state[LOCAL_WEIGHTS] = local
        if not copies:
            return Captured(tensors | state, numbers, course)
        spare = self._copied(state)
        return Captured(tensors | spare, numbers, course, spare)

    def _copied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies, in the memory of those that were saved before: fresh pages cost as much again."""
        spare = self._spares.popleft() if self._spares else {}
        found = {}
        for name, tensor in state.items():
            old = spare.get(name)
            fits = old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
            found[name] = old.copy_(tensor) if old is not None and fits else tensor.clone()
        return found

    def save(self, path: Path, frame: dict[str, Any], captured: Captured) -> None:
        """Makes frame, residual and inner state durable, still pending; from any thread."""
        beside = {"numbers": captured.numbers, "course": captured.course}
        self._store.complete(
            path, {**frame, **beside, "part": self._part.described()}, captured.tensors
        )
        if captured.spare is not None:
            self._spares.append(captured.spare)

    def save_part(self, round_number: int, course: dict[str, Any]) -> None:
        """A follower's inner state, pending until the leader has the receipt."""
        path = self.begin(round_number)
        captured = self.capture(copies=False, course=course)
        self.save(path, {"run_id": self._info.run_id}, captured)

    def frame(self, round_number: int, described: dict[str, Any]) -> Frame:
        """The frame of a pending round."""
        return self._store.frame(Saved(round_number, described, {}))

    def promote(self, round_number: int) -> None:
        """The receipt is here: pending becomes the checkpoint."""
        self._store.promote(round_number)

    def discard(self) -> None:
        """Nothing of what waits for a receipt is sent again."""
        self._store.discard_pending()

    def roll_back(self) -> None:
        """A round did not count: back to the last accepted one, on the disk and in memory."""
        self._store.discard_pending()
        saved = self._store.checkpoint()
        self.start(self._optimizer)
        if saved is not None:
            self._adopt(saved)

    def _adopt(self, saved: Saved) -> None:
        if self._optimizer is not None:
            optimizer_state.restore(self._optimizer, saved.tensors, saved.meta["numbers"])
        optimizer_state.set_random_state(saved.tensors)
        # Saved under a manifest version without error feedback, it has none.
        if saved.meta.get("residual", self._residual is not None):
            read = self._residual
            if read is None:
                read = torch.zeros(self._elements, dtype=torch.bfloat16)
                self._earlier_residual = read
            self._store.read_raw(saved, RESIDUAL_FILE, byte_view(read))
            self._carried = saved.round
        self._course = dict(saved.meta.get("course", {}))
        self._local = saved.tensors.get(LOCAL_WEIGHTS)
