"""Barriers of the present generation: every member arrives, or the missing ones are named.

In memory only, and only of one generation: whoever waits through a restart of the coordinator or a
change of the membership arrives again. Named by what the ledger counts (`round-12`), so that every
process means the same one.
"""

import threading
from collections import deque
from collections.abc import Callable

from atoll.errors import ProtocolError, StaleGeneration
from atoll.ledger.records import GenerationRecord
from atoll.protocol.messages import BarrierReply

MAX_OPEN = 64  # barriers that still wait, in one generation
MAX_COMPLETE = 256  # newest kept, so that an arrival whose answer was lost is answered again


class Barriers:
    """Who has arrived where. Thread-safe."""

    def __init__(self, *, on_complete: Callable[[], None]) -> None:
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._generation = 0
        self._open: dict[str, set[str]] = {}
        self._complete: deque[str] = deque(maxlen=MAX_COMPLETE)

    def arrive(self, generation: GenerationRecord, name: str, worker_id: str) -> BarrierReply:
        """`worker_id` has come to barrier `name`; the same arrival again changes nothing."""
        members = [member.worker_id for member in generation.members]
        with self._lock:
            self._enter(generation.number)
            arrived = set(members) if name in self._complete else self._at(name)
            arrived.add(worker_id)
            missing = tuple(m for m in members if m not in arrived)
            last = not missing and name not in self._complete
            if last:
                del self._open[name]
                self._complete.append(name)
        if last:
            self._on_complete()
        return BarrierReply(
            generation=generation.number,
            name=name,
            complete=not missing,
            arrived=len(members) - len(missing),
            missing=missing,
        )

    def _enter(self, number: int) -> None:
        if number < self._generation:
            raise StaleGeneration(
                f"generation={number} ended while a barrier waited, the present one is "
                f"{self._generation}; ask /training/ready who is in and arrive again",
                present=self._generation,
            )
        if number > self._generation:
            self._generation = number
            self._open.clear()
            self._complete.clear()

    def _at(self, name: str) -> set[str]:
        if name not in self._open and len(self._open) >= MAX_OPEN:
            raise ProtocolError(
                f"barrier {name!r} would be one more than {MAX_OPEN} that wait in generation "
                f"{self._generation}; complete the earlier ones first"
            )
        return self._open.setdefault(name, set())
