"""All invariants together, told of every event."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.service import Coordinator
from atoll.errors import (
    AtollError,
    Fenced,
    LeftOut,
    ManifestMismatch,
    NotReady,
    StaleGeneration,
    UnknownWorker,
)
from atoll.protocol.messages import Assignment, AssignmentRequest, HeartbeatRequest
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import Seen, check
from atoll.simulate.faults.invariants.dispatch import Dispatch
from atoll.simulate.faults.invariants.members import Members
from atoll.simulate.faults.invariants.rounds import RoundsCheck
from atoll.simulate.faults.invariants.rows import Rows
from atoll.simulate.faults.invariants.storage import Storage
from atoll.simulate.faults.invariants.tokens import TokensCheck
from atoll.simulate.faults.invariants.uploads import UploadsCheck
from atoll.simulate.faults.invariants.weights import WeightsCheck
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.rules import Asked
from atoll.simulate.faults.situations import Situations
from atoll.simulate.faults.world import World
from atoll.strategies.base import Strategy

# Messages that are no sign of life, or no worker's.
_SILENT = frozenset(
    {"offset", "commit", "info", "operator", "absent", "leave", "evaluation", "window"}
)
# What a skip leaves as it was.
_KEPT = ("contributions", "rounds", "workers", "generations", "snapshots", "manifests")


class Checker:
    """Compares what the coordinator says and records with what it may."""

    def __init__(self, world: World, home: Path, strategy: Strategy) -> None:
        self.checks = 0
        rules = world.scenario.schedule or Asked(strategy)
        self.reference = Reference(home / "blobs", strategy, rules, last=world.scenario.rounds)
        self.seen = Seen(world, self.reference)
        self.members = Members(self.seen)
        self._rows = Rows(rules)
        self._dispatch = Dispatch(self.seen)
        self._rounds = RoundsCheck(self.seen)
        self._uploads = UploadsCheck(self.seen)
        self._weights = WeightsCheck(self.reference, self._rows)
        self._storage = Storage(home, self.seen)
        self._tokens = TokensCheck(self.seen)
        self._situations = Situations(world, rules)
        self._last = View()
        self._is_quiet = True  # whether nothing interrupted the round that is closing

    # Durable state, whoever changed it

    def recorded(self, view: View) -> None:
        """A transaction ended, or the coordinator and this is what it left."""
        self.checks += 1
        before, self._last = self._last, view
        if view is before:
            return
        parts = (self._uploads, self._rounds, self._rows, self._dispatch, self.members)
        for part in (*parts, self._tokens):
            part.changed(before, view)
        if view.differs(before, "contributions", "snapshots"):
            self._storage.complete(view)
        self._weights.changed(view)
        self._situations.changed(before, view)
        self.members.acknowledged(view)
        self._uploads.acknowledged(view)

    def interrupted(self, view: View) -> None:
        """Messages come in while a round closes."""
        self._is_quiet = False
        self.recorded(view)

    # Messages

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """What is recorded now, this message brought about."""
        earlier, self.seen.call = self.seen.call, call
        try:
            yield
        finally:
            self.seen.call = earlier

    def refused(self, call: Call, error: AtollError, before: View, after: View) -> None:
        """A message was refused."""
        if isinstance(error, LeftOut):
            self._left_out(call, before, after)
        else:
            check("refused-changes-nothing", not after.differs(before), refused=call, error=error)
        self.recorded(after)
        self._situations.refused(error)
        # Known and heard, only not served yet; or its contribution was looked at and is refused.
        if isinstance(error, NotReady) or _is_of_contribution(call, error, after):
            self.seen.heard[call.worker_id] = self.seen.now

    def _left_out(self, call: Call, before: View, after: View) -> None:
        """A skip is recorded together with the end of what its worker holds in the round."""
        assert call.frame is not None
        key = (call.frame.header.round, call.worker_id)
        skips = after.table("skips").rows[len(before.table("skips").rows) :]
        told = [(skip.round, skip.worker_id) for skip in skips]
        known = key in before.table("skips").grouped("round", "worker_id")
        held = after.leased(*key)
        is_so = (told == [key] or (known and not told)) and not held
        check("moves-together", is_so, skipped=told, left_out=key, still_leased=held)
        check("refused-changes-nothing", not after.differs(before, *_KEPT), refused=call)

    def answered(self, call: Call, value: Any, before: View, after: View) -> None:
        """A message was answered."""
        self.members.answered(call, value, before, after)
        self.recorded(after)
        self._uploads.answered(call, value, after)
        if call.kind not in _SILENT:
            self.seen.heard[call.worker_id] = self.seen.now
        if isinstance(call.message, HeartbeatRequest):
            self.seen.speeds[call.worker_id] = call.message.telemetry.tokens_per_second
        if call.kind == "attend":
            self.seen.lost.pop(call.worker_id, None)
        version = getattr(value, "version", None)
        if version is not None and call.kind in ("register", "heartbeat", "assignment"):
            self._weights.told(version, getattr(value, "digest", None), after, who=call.sender)
        if isinstance(value, Assignment) and value.action == "train":
            self._check_training(call, value, after)

    def _check_training(self, call: Call, given: Assignment, view: View) -> None:
        assert given.round is not None and isinstance(call.message, AssignmentRequest)
        needs = self.reference.rules.merged_before(given.round)
        self._weights.trains(call.message, given.round, needs)
        self._rows.told(call.message, given, view)
        self._tokens.told(given, view)
        is_running = view.control.get("action", "run") == "run"
        check("operator-obeyed", is_running, trains=call.sender, command=view.control)

    def advanced(self, coordinator: Coordinator, before: View, after: View) -> None:
        """The closing thread had its look."""
        self.recorded(after)
        self._dispatch.advanced(after)
        self._weights.in_memory(coordinator, after)
        self.members.scanned(before, after)
        if after.differs(before, "snapshots"):
            self._storage.complete(after)
            if self._is_quiet:
                self._storage.pruned(after)
        self._is_quiet = True

    def restarted(self, view: View, coordinator: Coordinator) -> None:
        """A new life of the coordinator serves."""
        self.seen.restarted_at = self.seen.now
        self.seen.heard.clear()
        self.seen.lost.clear()
        self.seen.speeds.clear()
        self._is_quiet = True
        self.recorded(view)
        for part in (self.members, self._dispatch, self._rounds):
            part.restarted(view)
        self._check_whole(view, coordinator)

    def finished(self, view: View, coordinator: Coordinator) -> None:
        """The run is over."""
        self.recorded(view)
        self._rows.finished(view)
        self._check_whole(view, coordinator)

    def _check_whole(self, view: View, coordinator: Coordinator) -> None:
        """What only a coordinator that has just started, or is done, must have in order."""
        self._storage.complete(view)
        self._weights.restored(coordinator, view)
        self._storage.bounded(view)


def _is_of_contribution(call: Call, error: AtollError, view: View) -> bool:
    """Whether an announcement of somebody who may speak was refused for what it announces."""
    is_out = isinstance(error, (UnknownWorker, Fenced, StaleGeneration))
    if isinstance(error, ManifestMismatch):
        newest = view.table("manifests").rows[-1].sha256
        is_out = call.identity is None or call.identity.manifest_sha256 != newest
    return call.kind == "announce" and not is_out
