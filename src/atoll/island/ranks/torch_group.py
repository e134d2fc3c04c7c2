"""A group over `torch.distributed` (gloo), as torchrun starts it.

Outcomes travel as a length and JSON bytes in a uint8 tensor, both bounded; the object collectives
are pickle. Every collective has a deadline. While the leader is at work for longer than a part of
it, it sends a sign of life, so that an absent coordinator is not taken for a dead leader.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from atoll import errors
from atoll.errors import AtollError, GroupBroken, ProtocolError
from atoll.island.ranks.group import LEADER

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 120.0  # a rank that is later than this is taken for dead
SIGNS_PER_DEADLINE = 4
MAX_OUTCOME_BYTES = 8 << 20  # as much as the control plane lets through
MAX_MESSAGE = 4000  # characters of an error's sentence
PIECE_BYTES = 16 << 20  # of a broadcast
INTERRUPTED = "INTERRUPTED"

T = TypeVar("T")


class TorchGroup:
    """All ranks of the default process group, with a gloo group of its own beside it."""

    def __init__(
        self,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_leader = self.rank == LEADER
        self.is_interrupted = False
        self._deadline = timedelta(seconds=deadline_seconds)
        # Its own: outcomes must not mix with the training's collectives, nor need a GPU.
        self._group = dist.new_group(backend="gloo", timeout=self._deadline)
        self._held = ExitStack()
        self._held.callback(on_close)
        self._alone = False
        self._leading = False

    def lead(self, work: Callable[[], Any]) -> Any:
        """The leader's outcome of `work` on every rank."""
        if self._alone:
            return work()
        self._meet()
        if not self.is_leader:
            return self._follow()
        try:
            with self._signs_of_life(), self._at_work():
                value = work()
        except BaseException as error:
            # The error itself matters more than a rank that cannot be told.
            with suppress(GroupBroken):
                self._exchange({"error": _described(error)}, LEADER)
            raise
        self._exchange({"value": value}, LEADER)
        return value

    def together(self, work: Callable[[], T]) -> T:
        """Each rank's own result, or the lowest failing rank's error on all."""
        if self._alone:
            return work()
        result: T | None = None
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        failed = [rank for rank, (bad,) in enumerate(self.gather([own is not None])) if bad]
        if not failed:
            return result  # type: ignore[return-value] # `work` did return
        first = failed[0]
        message = self._exchange(_described(own) if own and self.rank == first else {}, first)
        if own is not None and self.rank == first:
            raise own
        raise _raised({**message, "message": f"rank {first}: {message['message']}"})

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values in rank order, so that sums over them have one order too."""
        mine = torch.tensor([float(v) for v in values], dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        with self._bounded("gathering numbers"):
            dist.all_gather(all_of_them, mine, group=self._group)
        return [one.tolist() for one in all_of_them]

    def broadcast(self, tensor: Tensor) -> None:
        """Fills `tensor` with the leader's values."""
        flat = tensor.view(-1)
        step = max(1, PIECE_BYTES // tensor.element_size())
        with self._bounded("sharing weights"):
            for start in range(0, len(flat), step):
                dist.broadcast(flat[start : start + step], src=LEADER, group=self._group)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Calls within do not involve the other ranks."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def interrupt(self) -> None:
        """Ends the leader's waiting at once; else the ranks end together after their next step."""
        self.is_interrupted = True
        if self._leading:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Lets the process group go if it was made for this; harmless when repeated."""
        self._held.close()

    def abandon(self) -> None:
        """`close` waits for nothing any more, and lets nothing go: the process is about to end."""
        self._held.pop_all()

    # What the leader does and tells

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._leading = True
        try:
            if self.is_interrupted:
                raise KeyboardInterrupt
            with self.alone():
                yield
        finally:
            self._leading = False

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        done = threading.Event()
        interval = self._deadline.total_seconds() / SIGNS_PER_DEADLINE

        def tell() -> None:
            # A rank that is gone is met by the outcome that follows.
            with suppress(GroupBroken):
                while not done.wait(interval):
                    self._exchange({"wait": True}, LEADER)

        thread = threading.Thread(target=tell, name="signs-of-life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _follow(self) -> Any:
        while True:
            message = self._exchange({}, LEADER)
            if "error" in message:
                raise _raised(message["error"])
            if "value" in message:
                return message["value"]

    # Collectives, each with its deadline

    def _meet(self) -> None:
        """All ranks are here; else GroupBroken with those that are not."""
        with self._bounded("meeting"):
            dist.monitored_barrier(self._group, timeout=self._deadline, wait_all_ranks=True)

    def _exchange(self, message: dict[str, Any], source: int) -> dict[str, Any]:
        """The message of rank `source` on every rank."""
        data = json.dumps(message).encode() if self.rank == source else b""
        length = torch.tensor([len(data)], dtype=torch.int64)
        with self._bounded("telling an outcome"):
            dist.broadcast(length, src=source, group=self._group)
            nbytes = int(length.item())
            if not 0 < nbytes <= MAX_OUTCOME_BYTES:
                raise ProtocolError(
                    f"an outcome of {nbytes} bytes from rank {source} is not within 1 and "
                    f"{MAX_OUTCOME_BYTES}; nothing of that size is told between ranks"
                )
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            if self.rank == source:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(buffer, src=source, group=self._group)
        found = json.loads(buffer.numpy().tobytes())
        if not isinstance(found, dict):
            raise ProtocolError(f"rank {source} told {type(found).__name__}, not an object")
        return found

    @contextmanager
    def _bounded(self, what: str, *, others_pass: bool = False) -> Iterator[None]:
        """Names a collective that breaks; with `others_pass` other errors go through."""
        try:
            yield
        except RuntimeError as exc:  # gloo has no other: a deadline, a closed connection
            is_ours = isinstance(exc, dist.DistError) or "gloo" in str(exc).lower()
            if others_pass and not is_ours:
                raise
            raise GroupBroken(
                f"rank {self.rank} of {self.size}, {what} (deadline "
                f"{self._deadline.total_seconds():g} s): {str(exc).splitlines()[0]}; "
                f"a rank of this island is gone or late; start the group again and it continues"
            ) from exc

    def training(self) -> AbstractContextManager[None]:
        """Names a collective of the training itself that breaks; other errors pass through."""
        return self._bounded("training", others_pass=True)


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return {"code": INTERRUPTED, "message": ""}
    if isinstance(error, AtollError):
        return {"code": error.code, "message": str(error)[:MAX_MESSAGE]}
    said = f"{type(error).__name__}: {error}"
    return {"code": AtollError.code, "message": said[:MAX_MESSAGE]}


def _raised(told: dict[str, str]) -> BaseException:
    if told["code"] == INTERRUPTED:
        return KeyboardInterrupt()
    return errors.from_code(told["code"], told["message"])
