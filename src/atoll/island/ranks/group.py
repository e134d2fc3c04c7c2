"""The ranks of one island: what the leader learns, every rank learns, errors included.

Only the leader (rank 0) talks to the coordinator. `lead` runs a piece of work on it and hands the
outcome, a JSON value or a typed error, to all ranks, so that they go on or raise together.
Implementations: `SoloGroup`, an island of one process, and `torch_group.TorchGroup`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from torch import Tensor

LEADER = 0

T = TypeVar("T")


class Group(Protocol):
    """What an island's code asks of its ranks. Collective methods are called by all of them."""

    rank: int
    size: int
    is_leader: bool
    is_interrupted: bool  # whether this rank was asked to end

    def lead(self, work: Callable[[], Any]) -> Any:
        """Collective: the leader's result of `work`, a JSON value, on every rank.

        What `work` raises is raised on every rank, as the same type. Within `work` the leader is on
        its own: a nested `lead` or `together` runs there alone.
        """
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Collective: each rank's own result; when one raises, all raise the lowest rank's."""
        ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Collective: every rank's `values`, in rank order; equally many on each."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Collective: fills a contiguous CPU tensor with the leader's values, in bounded pieces."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """A context in which this rank's calls are not collective."""
        ...

    def training(self) -> AbstractContextManager[None]:
        """A context that names what breaks in the training's own collectives: GroupBroken."""
        ...

    def interrupt(self) -> None:
        """From a signal handler: all ranks raise KeyboardInterrupt together, soon."""
        ...

    def close(self) -> None: ...


class SoloGroup:
    """An island of one process: nothing to tell anybody."""

    rank = LEADER
    size = 1
    is_leader = True
    is_interrupted = False

    def lead(self, work: Callable[[], Any]) -> Any:
        """What `work` gives."""
        return work()

    def together(self, work: Callable[[], T]) -> T:
        """What `work` gives."""
        return work()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The one rank's values."""
        return [list(values)]

    def broadcast(self, tensor: Tensor) -> None:
        """The tensor is the leader's already."""

    def alone(self) -> AbstractContextManager[None]:
        """This rank is always alone."""
        return nullcontext()

    def training(self) -> AbstractContextManager[None]:
        """There are no collectives."""
        return nullcontext()

    def interrupt(self) -> None:
        """Raises at once."""
        raise KeyboardInterrupt

    def close(self) -> None:
        """Holds nothing."""


SOLO = SoloGroup()
