"""Members: who may speak, in which generation, and who is taken for dead."""

import hashlib
from collections.abc import Callable
from typing import Any

from atoll.protocol.messages import Identity
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, Violation

PRESENCE_GRACE_SECONDS = 1.0
# What asks for the present generation when it arrives; the rest of an upload belongs to the
# generation in which it began.
_ENTERING = frozenset(
    {
        "heartbeat",
        "assignment",
        "evaluation",
        "offset",
        "begin",
        "download",
        "leave",
        "attend",
    }
)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Members:
    """Follows registrations beside the registry."""

    def __init__(self, seen: Seen, now: Callable[[], float]) -> None:
        self._seen = seen
        self._now = now
        self._incarnation: dict[str, int] = {}  # newest that was acknowledged
        self._ordered = 0  # the operator's newest acknowledged command
        self.kicked: set[str] = set()

    def changed(self, before: View, after: View) -> None:
        """Membership and generation moved together."""
        if not after.differs(before, "workers", "generations"):
            return
        was, now = _active(before), _active(after)
        if not (
            after.generation >= before.generation
            and (was == now or after.generation > before.generation)
        ):
            raise Violation(
                "generation-moves",
                f"from {was} to {now} with generation {before.generation} -> {after.generation}",
            )
        for worker_id, row in before.workers.items():
            later = after.workers.get(worker_id)
            if later is None or later["incarnation"] < row["incarnation"]:
                raise Violation("generation-moves", f"{worker_id} went from {row} to {later}")

    def answered(self, call: Call, value: Any, before: View, after: View) -> None:
        """Who was answered had the right to be."""
        if call.kind == "register":
            self._registered(call, value, before, after)
            return
        identity = call.identity
        if identity is None or call.kind == "write":
            return  # a chunk is only kept; begin and commit ask who sends it
        self._check_speaker(call, identity, before)
        if call.kind in _ENTERING and identity.generation != before.generation:
            raise Violation(
                "generation-current",
                f"{call.kind} of {identity.worker_id} in generation {identity.generation} was "
                f"answered in generation {before.generation}",
            )

    def _registered(self, call: Call, reply: Any, before: View, after: View) -> None:
        was = before.workers.get(call.worker_id)
        timeout = self._seen.scenario.settings["heartbeat_timeout"]
        silence = self._seen.silence(call.worker_id, now=self._now())
        if not (
            was is None
            or not was["active"]
            or was["key_sha256"] == call.facts["key_sha256"]
            or silence > timeout - ROUNDING_SECONDS
        ):
            raise Violation(
                "id-is-held",
                f"{call.sender} took over {call.worker_id}, which was heard {silence:.2f} s ago",
            )
        row = after.workers.get(call.worker_id)
        if not (
            row is not None
            and row["incarnation"] == reply.incarnation
            and bool(row["active"])
            and row["key_sha256"] == call.facts["key_sha256"]
        ):
            raise Violation(
                "acked-is-durable",
                f"{call.worker_id} was told incarnation {reply.incarnation}, the ledger has {row}",
            )
        if reply.incarnation <= self._incarnation.get(call.worker_id, 0):
            raise Violation(
                "fenced-gets-nothing",
                f"{call.worker_id} was given incarnation {reply.incarnation} twice",
            )
        if call.worker_id in self.kicked:
            raise Violation(
                "operator-obeyed",
                f"{call.worker_id} was taken in although the operator took it out",
            )
        self._incarnation[call.worker_id] = reply.incarnation
        self._seen.lost.pop(call.worker_id, None)

    def _check_speaker(self, call: Call, identity: Identity, before: View) -> None:
        row = before.workers.get(identity.worker_id)
        if not (
            row is not None
            and bool(row["active"])
            and row["incarnation"] == identity.incarnation
            and row["key_sha256"] == _hash(identity.island_key)
        ):
            raise Violation(
                "fenced-gets-nothing",
                f"{call.kind} of {identity.worker_id} incarnation {identity.incarnation} was "
                f"answered, the ledger has {row}",
            )

    def acknowledged(self, view: View) -> None:
        """What was acknowledged to workers and the operator is still there."""
        for worker_id, incarnation in self._incarnation.items():
            row = view.workers.get(worker_id)
            if row is None or row["incarnation"] < incarnation:
                raise Violation(
                    "acked-is-durable",
                    f"incarnation {incarnation} of {worker_id} was acknowledged, found {row}",
                )
        if int(view.control.get("number", 0)) < self._ordered:
            raise Violation(
                "acked-is-durable",
                f"command {self._ordered} was acknowledged, found {view.control}",
            )

    def restarted(self, view: View) -> None:
        """A kick that a crash cut in two is whole again."""
        for worker_id, row in view.workers.items():
            if row["active"] and f"kicked/{worker_id}" in view.control:
                raise Violation("operator-obeyed", f"{worker_id} is kept out and still in")

    def ordered(self, number: int) -> None:
        """The operator was told that command `number` is in force."""
        self._ordered = max(self._ordered, number)

    def scanned(self, before: View, after: View, *, now: float, timeout: float) -> None:
        """After the closing thread's look: the silent are out, the others are in."""
        for worker_id, row in after.workers.items():
            silence = self._seen.silence(worker_id, now=now)
            if row["active"]:
                if silence > timeout + ROUNDING_SECONDS:
                    raise Violation(
                        "silent-is-evicted",
                        f"{worker_id} was heard {silence:.2f} s ago and is still in",
                    )
                continue
            was = before.workers.get(worker_id)
            if was is None or not was["active"] or was["incarnation"] != row["incarnation"]:
                continue
            lost = self._seen.lost.get(worker_id)
            if not (
                silence > timeout - ROUNDING_SECONDS
                or (lost is not None and now - lost > PRESENCE_GRACE_SECONDS - ROUNDING_SECONDS)
            ):
                raise Violation(
                    "live-is-kept", f"{worker_id} was evicted, heard {silence:.2f} s ago"
                )


def _active(view: View) -> list[tuple[str, int]]:
    return sorted(
        (worker_id, row["incarnation"]) for worker_id, row in view.workers.items() if row["active"]
    )
