"""Members: who may speak, in which generation, and who is taken for dead."""

import hashlib
from typing import Any

from atoll.protocol.messages import Identity, RegisterRequest
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, check
from atoll.simulate.faults.scenario import HEARTBEAT_TIMEOUT

PRESENCE_GRACE_SECONDS = 1.0


def _is_of(worker: Row | None, incarnation: int, key: str) -> bool:
    """Whether the ledger has this life of a worker in, under this island key."""
    key_sha256 = hashlib.sha256(key.encode()).hexdigest()
    return worker is not None and bool(
        worker.active and (worker.incarnation, worker.key_sha256) == (incarnation, key_sha256)
    )


class Members:
    """Follows registrations beside the registry."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._incarnation: dict[str, int] = {}  # newest that was acknowledged
        self._ordered = 0  # the operator's newest acknowledged command
        self.kicked: set[str] = set()

    def changed(self, before: View, after: View) -> None:
        """Membership and generation moved together."""
        if not after.differs(before, "workers", "generations"):
            return
        was, now, steps = _active(before), _active(after), after.generation - before.generation
        are_together = steps > 0 or (steps == 0 and was == now)
        check("generation-moves", are_together, was=was, now=now, by=steps)
        for worker_id, row in before.workers.items():
            later = after.workers.get(worker_id)
            is_later = later is not None and later.incarnation >= row.incarnation
            check("generation-moves", is_later, was=row, became=later)

    def answered(self, call: Call, value: Any, before: View, after: View) -> None:
        """Who was answered had the right to be."""
        if isinstance(call.message, RegisterRequest):
            self._registered(call, call.message.island_key, value.incarnation, before, after)
        elif call.identity is not None and call.kind != "write":
            # A chunk is only kept; begin and commit ask who sends it.
            self._check_speaker(call, call.identity, before)

    def _registered(
        self, call: Call, key: str, incarnation: int, before: View, after: View
    ) -> None:
        was, silence = before.workers.get(call.worker_id), self._seen.silence(call.worker_id)
        is_free = was is None or not was.active or silence > HEARTBEAT_TIMEOUT - ROUNDING_SECONDS
        is_own = was is not None and _is_of(was, was.incarnation, key)
        check("id-is-held", is_free or is_own, taken_by=call.sender, was=was, silence=silence)
        row = after.workers.get(call.worker_id)
        check("acked-is-durable", _is_of(row, incarnation, key), told=incarnation, recorded=row)
        newest = self._incarnation.get(call.worker_id, 0)
        check("fenced-gets-nothing", incarnation > newest, given_twice=incarnation, to=call.sender)
        check("operator-obeyed", call.worker_id not in self.kicked, kicked_is_in=call.worker_id)
        self._incarnation[call.worker_id] = incarnation
        self._seen.lost.pop(call.worker_id, None)

    def _check_speaker(self, call: Call, identity: Identity, before: View) -> None:
        row = before.workers.get(identity.worker_id)
        speaks = _is_of(row, identity.incarnation, identity.island_key)
        check("fenced-gets-nothing", speaks, kind=call.kind, of=identity, recorded=row)
        if call.kind != "commit":  # the rest of an upload is of the generation in which it began
            now = before.generation
            check("generation-current", identity.generation == now, call=call, generation=now)

    def acknowledged(self, view: View) -> None:
        """What was acknowledged to workers and the operator is still there."""
        for worker_id, incarnation in self._incarnation.items():
            row = view.workers.get(worker_id)
            is_kept = row is not None and row.incarnation >= incarnation
            check("acked-is-durable", is_kept, told=incarnation, to=worker_id, recorded=row)
        is_kept = int(view.control.get("number", 0)) >= self._ordered
        check("acked-is-durable", is_kept, command=self._ordered, recorded=view.control)

    def restarted(self, view: View) -> None:
        """A kick that a crash cut in two is whole again."""
        for worker_id, row in view.workers.items():
            is_kept_out = f"kicked/{worker_id}" in view.control
            check("operator-obeyed", not (row.active and is_kept_out), kicked_and_in=row)

    def ordered(self, number: int) -> None:
        """The operator was told that command `number` is in force."""
        self._ordered = max(self._ordered, number)

    def scanned(self, before: View, after: View) -> None:
        """After the closing thread's look: the silent are out, the others are in."""
        for worker_id, row in after.workers.items():
            late = self._seen.silence(worker_id) - HEARTBEAT_TIMEOUT
            if row.active:
                check("silent-is-evicted", late <= ROUNDING_SECONDS, still_in=row, late=late)
                continue
            was = before.workers.get(worker_id)
            if was is not None and was.active and was.incarnation == row.incarnation:
                lost = self._seen.now - self._seen.lost.get(worker_id, self._seen.now)
                is_gone = (
                    late > -ROUNDING_SECONDS or lost > PRESENCE_GRACE_SECONDS - ROUNDING_SECONDS
                )
                check("live-is-kept", is_gone, evicted=row, late=late, without_stream=lost)


def _active(view: View) -> list[tuple[str, int]]:
    return sorted((row.worker_id, row.incarnation) for row in view.workers.values() if row.active)
