"""What the conversation wants done. Whoever drives it does that and gives the result or the error.

`island.driver` drives it with a link, a clock and threads; the fault simulator with events.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from pydantic import BaseModel

from atoll.island.link.base import Attendance, Download, FrameSource, Work
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Assignment, EvaluationTask, Identity
from atoll.rows import RowRange

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """Sends a message; the result is its answer."""

    message: Ask[Any]
    alone: bool = False  # by the leader, from a thread beside the training


@dataclass(frozen=True)
class Upload:
    """Sends a frame; the result is the receipt."""

    identity: Identity
    frame: FrameSource
    before_commit: Work


@dataclass(frozen=True)
class Attend:
    """Opens a presence stream; the result is an `Attendance`."""

    identity: Identity


@dataclass(frozen=True)
class Pause:
    """Lets time pass."""

    seconds: float


@dataclass(frozen=True)
class Persist:
    """Begins to make something durable; the result is a function that waits until it is."""

    work: Work


@dataclass(frozen=True)
class Lead:
    """Lets the leader alone go these steps; their result, a JSON value, is every rank's."""

    make: Callable[[], "Steps[Any]"]


@dataclass(frozen=True)
class Foresee:
    """These rows will be trained next: they can be read meanwhile."""

    ranges: tuple[RowRange, ...]


@dataclass(frozen=True)
class Evaluate:
    """Held-out rows to evaluate; the result is the `Partial` of all ranks, or None for none."""

    task: EvaluationTask


@dataclass(frozen=True)
class Train:
    """Rows to train, from the published weights; the result is a `Trained`."""

    assignment: Assignment


@dataclass(frozen=True)
class Partial:
    """A partial sum of losses and the tokens it was summed over."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Trained(Partial):
    """What was trained of a round, by all ranks together."""

    rows: int

    def __add__(self, other: "Trained") -> "Trained":
        loss_sum, tokens = self.loss_sum + other.loss_sum, self.tokens + other.tokens
        return Trained(loss_sum, tokens, self.rows + other.rows)


Intent = Send | Upload | Download | Attend | Pause | Persist | Lead | Foresee | Evaluate | Train
Steps = Generator[Intent, Any, T]


def send(message: Ask[R], *, alone: bool = False) -> Steps[R]:
    """The answer to `message`."""
    reply: R = yield Send(message, alone)
    return reply


def attend(identity: Identity) -> Steps[Attendance]:
    """An open presence stream."""
    opened: Attendance = yield Attend(identity)
    return opened


def led(make: Callable[[], "Steps[T]"]) -> Steps[T]:
    """What the leader's steps come to, on every rank: a JSON value, so a tuple is a list there."""
    result: T = yield Lead(make)
    return result


def decided(work: Callable[[], T]) -> Steps[T]:
    """What `work` gives on the leader, on every rank."""

    @wraps(work)
    def steps() -> Steps[T]:
        yield from ()
        return work()

    return led(steps)
