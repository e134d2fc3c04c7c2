"""What the operator wants: run, pause or stop, and who is kept out. Durable, so a restart obeys.

Islands learn of it on the heartbeat and acknowledge it there; acknowledgements are in memory.
"""

import logging
import threading
from collections.abc import Mapping
from typing import cast

from atoll.errors import Forbidden
from atoll.ledger.ledger import Ledger
from atoll.protocol.control import Action, Command

log = logging.getLogger(__name__)

_NUMBER, _ACTION, _ENDED, _KICKED = "number", "action", "ended", "kicked/"


class Control:
    """The command in force and the workers that are kept out. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()  # held for a transaction, so heartbeats do not take it
        self._acknowledged: dict[str, int] = {}  # single items are read and written: no lock
        with ledger.reading() as t:
            kept = t.control.all()
        self._command = Command(
            number=int(kept.get(_NUMBER, "0")), action=cast(Action, kept.get(_ACTION, "run"))
        )
        # Replaced whole, so that it is read without the lock.
        self._kicked = frozenset(n.removeprefix(_KICKED) for n in kept if n.startswith(_KICKED))
        if self._command.action == "stop":
            if kept.get(_ENDED) == str(self._command.number):
                self.order("run")  # it has stopped; starting it again is the wish to go on
            else:
                log.warning("the stop that an earlier life was asked for goes on")

    @property
    def command(self) -> Command:
        return self._command

    @property
    def kicked(self) -> tuple[str, ...]:
        """Workers that are kept out, in order."""
        return tuple(sorted(self._kicked))

    def order(self, action: Action) -> Command:
        """The command in force from now on; the same one again changes nothing."""
        with self._lock:
            if action != self._command.action:
                command = Command(number=self._command.number + 1, action=action)
                self._record({_NUMBER: str(command.number), _ACTION: action})
                self._command = command
            return self._command

    def end(self) -> None:
        """The stop in force has been carried out: the next start goes on; harmless when none is."""
        with self._lock:
            if self._command.action == "stop":
                self._record({_ENDED: str(self._command.number)})

    def kick(self, worker_id: str, *, wall: float) -> None:
        """Keeps a worker out until it is allowed again."""
        with self._lock:
            self._record({f"{_KICKED}{worker_id}": f"{wall:.3f}"})
            self._kicked |= {worker_id}

    def allow(self, worker_id: str) -> None:
        """Lets a worker in again; harmless when it was not kept out."""
        with self._lock:
            self._record({f"{_KICKED}{worker_id}": None})
            self._kicked -= {worker_id}

    def _record(self, values: Mapping[str, str | None]) -> None:
        with self._ledger.writing() as t:
            t.control.set(values)

    def check(self, worker_id: str) -> None:
        """Forbidden for a worker that the operator took out."""
        if worker_id in self._kicked:
            raise Forbidden(
                f"worker_id={worker_id!r} was taken out of the run by its operator; only "
                f"`atoll allow URL {worker_id}` lets it in again"
            )

    def acknowledge(self, worker_id: str, number: int) -> None:
        """An island says which command it knows."""
        self._acknowledged[worker_id] = number

    def acknowledged(self, worker_id: str) -> bool:
        """Whether an island knows the command in force."""
        return self._acknowledged.get(worker_id, 0) == self._command.number
