"""What the conversation wants done. Whoever drives it does that and gives the result or the error.

`island.driver` drives it with a link, a clock and threads; the fault simulator with events.
"""

import math
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from atoll.island.gather.base import Collect, Publish
from atoll.island.link.base import Attendance, Download, FrameSource, Work
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Assignment, EvaluationTask, Identity
from atoll.rows import RowRange

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class Send(NamedTuple):
    """Sends a message; the result is its answer."""

    message: Ask[Any]
    alone: bool = False  # by the leader, from a thread beside the training


class Upload(NamedTuple):
    """Sends a frame; the result is the receipt."""

    identity: Identity
    frame: FrameSource
    before_commit: Work


class Attend(NamedTuple):
    """Opens a presence stream; the result is an `Attendance`."""

    identity: Identity


class Pause(NamedTuple):
    """Lets time pass."""

    seconds: float


class Until(NamedTuple):
    """Waits until another thread of this island has made `holds` true."""

    holds: Callable[[], object]
    changed: threading.Condition  # that other thread notifies it


class Persist(NamedTuple):
    """Begins to make something durable; the result is a function that waits until it is."""

    work: Work


class Lead(NamedTuple):
    """Steps that only the leader carries out; every rank gets their result, a JSON value."""

    make: Callable[[], "Steps[Any]"]


class Foresee(NamedTuple):
    """These rows will be trained next: they can be read meanwhile."""

    ranges: tuple[RowRange, ...]


class Evaluate(NamedTuple):
    """Held-out rows to evaluate; the result is the `Partial` of all ranks, or None."""

    task: EvaluationTask


class Train(NamedTuple):
    """Rows to train on the local weights; the result is a `Trained`.

    None: it was given up halfway, because something that was handed in before does not count.
    """

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


Said = Send | Upload | Download | Attend | Publish | Collect
Intent = Said | Pause | Until | Persist | Lead | Foresee | Evaluate | Train
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
    """The result of the leader's steps, on every rank. It travels as JSON: followers get lists."""
    result: T = yield Lead(make)
    return result


def decided(work: Callable[[], T]) -> Steps[T]:
    """The leader's result of `work`, on every rank."""

    @wraps(work)
    def steps() -> Steps[T]:
        yield from ()
        return work()

    return led(steps)
