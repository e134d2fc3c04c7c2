"""Members: who may speak, in which generation, and who is taken for dead."""

import hashlib
from collections.abc import Callable
from typing import Any

from atoll.protocol.messages import Identity
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, must

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
        if before.tables.get("workers") == after.tables.get("workers") and (
            before.tables.get("generations") == after.tables.get("generations")
        ):
            return
        was, now = _active(before), _active(after)
        must(
            after.generation >= before.generation
            and (was == now or after.generation > before.generation),
            "generation-moves",
            "from {} to {} with generation {} -> {}",
            was,
            now,
            before.generation,
            after.generation,
        )
        for worker_id, row in before.workers.items():
            later = after.workers.get(worker_id)
            must(
                later is not None and later["incarnation"] >= row["incarnation"],
                "generation-moves",
                "{} went from {} to {}",
                worker_id,
                row,
                later,
            )

    def answered(self, call: Call, value: Any, before: View, after: View) -> None:
        """Who was answered had the right to be."""
        if call.kind == "register":
            self._registered(call, value, before, after)
            return
        identity = call.identity
        if identity is None or call.kind == "write":
            return  # a chunk is only kept; begin and commit ask who sends it
        self._check_speaker(call, identity, before)
        if call.kind in _ENTERING:
            must(
                identity.generation == before.generation,
                "generation-current",
                "{} of {} in generation {} was answered in generation {}",
                call.kind,
                identity.worker_id,
                identity.generation,
                before.generation,
            )

    def _registered(self, call: Call, reply: Any, before: View, after: View) -> None:
        was = before.workers.get(call.worker_id)
        timeout = self._seen.scenario.settings["heartbeat_timeout"]
        silence = self._seen.silence(call.worker_id, now=self._now())
        must(
            was is None
            or not was["active"]
            or was["key_sha256"] == call.facts["key_sha256"]
            or silence > timeout - ROUNDING_SECONDS,
            "id-is-held",
            f"{call.sender} took over {call.worker_id}, which was heard {silence:.2f} s ago",
        )
        row = after.workers.get(call.worker_id)
        must(
            row is not None
            and row["incarnation"] == reply.incarnation
            and bool(row["active"])
            and row["key_sha256"] == call.facts["key_sha256"],
            "acked-is-durable",
            f"{call.worker_id} was told incarnation {reply.incarnation}, the ledger has {row}",
        )
        must(
            reply.incarnation > self._incarnation.get(call.worker_id, 0),
            "fenced-gets-nothing",
            f"{call.worker_id} was given incarnation {reply.incarnation} twice",
        )
        must(
            call.worker_id not in self.kicked,
            "operator-obeyed",
            f"{call.worker_id} was taken in although the operator took it out",
        )
        self._incarnation[call.worker_id] = reply.incarnation
        self._seen.lost.pop(call.worker_id, None)

    def _check_speaker(self, call: Call, identity: Identity, before: View) -> None:
        row = before.workers.get(identity.worker_id)
        must(
            row is not None
            and bool(row["active"])
            and row["incarnation"] == identity.incarnation
            and row["key_sha256"] == _hash(identity.island_key),
            "fenced-gets-nothing",
            "{} of {} incarnation {} was answered, the ledger has {}",
            call.kind,
            identity.worker_id,
            identity.incarnation,
            row,
        )

    def acknowledged(self, view: View) -> None:
        """What was acknowledged to workers and the operator is still there."""
        for worker_id, incarnation in self._incarnation.items():
            row = view.workers.get(worker_id)
            must(
                row is not None and row["incarnation"] >= incarnation,
                "acked-is-durable",
                "incarnation {} of {} was acknowledged, found {}",
                incarnation,
                worker_id,
                row,
            )
        must(
            int(view.control.get("number", 0)) >= self._ordered,
            "acked-is-durable",
            "command {} was acknowledged, found {}",
            self._ordered,
            view.control,
        )

    def restarted(self, view: View) -> None:
        """A kick that a crash cut in two is whole again."""
        for worker_id, row in view.workers.items():
            must(
                not (row["active"] and f"kicked/{worker_id}" in view.control),
                "operator-obeyed",
                f"{worker_id} is kept out and still in",
            )

    def ordered(self, number: int) -> None:
        """The operator was told that command `number` is in force."""
        self._ordered = max(self._ordered, number)

    def scanned(self, before: View, after: View, *, now: float, timeout: float) -> None:
        """After the closing thread's look: the silent are out, the others are in."""
        for worker_id, row in after.workers.items():
            silence = self._seen.silence(worker_id, now=now)
            if row["active"]:
                must(
                    silence <= timeout + ROUNDING_SECONDS,
                    "silent-is-evicted",
                    "{} was heard {:.2f} s ago and is still in",
                    worker_id,
                    silence,
                )
                continue
            was = before.workers.get(worker_id)
            if was is None or not was["active"] or was["incarnation"] != row["incarnation"]:
                continue
            lost = self._seen.lost.get(worker_id)
            must(
                silence > timeout - ROUNDING_SECONDS
                or (lost is not None and now - lost > PRESENCE_GRACE_SECONDS - ROUNDING_SECONDS),
                "live-is-kept",
                "{} was evicted, heard {:.2f} s ago",
                worker_id,
                silence,
            )


def _active(view: View) -> list[tuple[str, int]]:
    return sorted(
        (worker_id, row["incarnation"]) for worker_id, row in view.workers.items() if row["active"]
    )
