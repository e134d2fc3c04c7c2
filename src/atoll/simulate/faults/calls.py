"""What a simulated worker asks of the coordinator: one message, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Identity
from atoll.simulate.faults.standin import Frame


@dataclass(frozen=True)
class Call:
    """One message. `work` is what its arrival makes the coordinator do."""

    kind: str
    work: Callable[[Coordinator], Any] = field(repr=False)
    sender: str  # the process, not the worker_id: two processes may claim one
    worker_id: str
    identity: Identity | None = None  # of a mutating message
    message: Ask[Any] | None = None  # where it is one of the control plane
    life: int | None = None  # of the coordinator: a stream belongs to one, others answer nothing
    frame: Frame | None = field(default=None, repr=False)  # what an upload is about


@dataclass(frozen=True)
class Answer:
    """What a message came to: a value, or the refusal.

    The value of a message that opens a stream is that stream and the life of the coordinator.
    """

    value: Any = None
    error: AtollError | None = None

    @property
    def word(self) -> str:
        """For the history."""
        return "ok" if self.error is None else self.error.code
