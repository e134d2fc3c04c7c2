"""All invariants together, told of every event."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, NotReady
from atoll.protocol.messages import Assignment
from atoll.simulate.faults.asked import Asked
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import Seen, Violation
from atoll.simulate.faults.invariants.dispatch import Dispatch
from atoll.simulate.faults.invariants.members import Members
from atoll.simulate.faults.invariants.rounds import RoundsCheck
from atoll.simulate.faults.invariants.rows import Rows
from atoll.simulate.faults.invariants.storage import Storage
from atoll.simulate.faults.invariants.uploads import UploadsCheck
from atoll.simulate.faults.invariants.weights import WeightsCheck
from atoll.simulate.faults.loop import EventLoop
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.base import Strategy

# Messages that are no sign of life, or no worker's.
_SILENT = frozenset({"offset", "commit", "info", "operator", "absent", "leave", "evaluation"})


class Checker:
    """Compares what the coordinator says and records with what it may."""

    def __init__(self, scenario: Scenario, home: Path, loop: EventLoop, strategy: Strategy) -> None:
        self.scenario = scenario
        self.checks = 0
        self.seen = Seen(scenario)
        self.asked = Asked()
        self.reference = Reference(home / "blobs", self.asked, strategy)
        self.rows = Rows()
        self.dispatch = Dispatch(scenario)
        self.rounds = RoundsCheck(self.seen, self.asked)
        self.members = Members(self.seen, lambda: loop.now)
        self.uploads = UploadsCheck(self.reference, self.asked)
        self.weights = WeightsCheck(self.reference, self.rows)
        self.storage = Storage(home, self.reference, workers=scenario.islands)
        self._loop = loop
        self._last = View()
        self._call: Call | None = None  # the message that is being handled
        self._is_quiet = True  # whether nothing interrupted the round that is closing

    # Durable state, whoever changed it

    def _changed(self, view: View) -> None:
        self.checks += 1
        before = self._last
        if view is before:
            return
        self._last = view
        self.uploads.changed(self._call, before, view)
        self.rounds.changed(before, view, now=self._loop.now)
        self.rows.changed(before, view)
        self.dispatch.changed(before, view, now=self._loop.now)
        self.members.changed(before, view)
        if view.differs(before, "contributions", "snapshots"):
            self.storage.complete(view)
        self.weights.changed(view)
        self.members.acknowledged(view)
        self.uploads.acknowledged(view)

    def recorded(self, view: View) -> None:
        """A transaction ended, or the coordinator and this is what it left."""
        self._changed(view)

    def interrupted(self, view: View) -> None:
        """Messages come in while a round closes."""
        self._is_quiet = False
        self._changed(view)

    # Messages

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """What is recorded now, this message brought about."""
        earlier, self._call = self._call, call
        try:
            yield
        finally:
            self._call = earlier

    def refused(self, call: Call, error: AtollError, before: View, after: View) -> None:
        """A message was refused."""
        if after.differs(before):
            raise Violation(
                "refused-changes-nothing",
                f"{call.kind} of {call.sender} was refused with {error.code} and changed rows",
            )
        self._changed(after)
        if isinstance(error, NotReady):  # known and heard, only not served yet
            self.seen.heard[call.worker_id] = self._loop.now

    def answered(self, call: Call, value: Any, before: View, after: View) -> None:
        """A message was answered."""
        self.members.answered(call, value, before, after)
        self._changed(after)
        self.uploads.answered(call, value, after)
        if call.kind not in _SILENT:
            self.seen.heard[call.worker_id] = self._loop.now
        if call.kind == "attend":
            self.seen.lost.pop(call.worker_id, None)
        version = getattr(value, "version", None)
        if version is not None and call.kind in ("register", "heartbeat", "assignment"):
            self.weights.told(version, getattr(value, "digest", None), after, who=call.sender)
        if isinstance(value, Assignment) and value.action == "train":
            self._check_training(call, value, after)

    def _check_training(self, call: Call, given: Assignment, view: View) -> None:
        assert given.round is not None
        self.weights.trains(
            call.sender,
            digest=call.facts["digest"],
            needs=self.asked.strategy_of(view, given.round).needs(given.round),
            round_number=given.round,
        )
        self.rows.told(call.worker_id, given.round, given.ranges, view)
        if view.control.get("action", "run") != "run":
            raise Violation(
                "operator-obeyed",
                f"{call.sender} was given rows while the command is {view.control}",
            )

    def advanced(self, coordinator: Coordinator, before: View, after: View) -> None:
        """The closing thread had its look."""
        self._changed(after)
        self.dispatch.advanced(after, now=self._loop.now)
        self.weights.in_memory(coordinator, after, invariant="memory-follows-ledger")
        timeout = self.scenario.settings["heartbeat_timeout"]
        self.members.scanned(before, after, now=self._loop.now, timeout=timeout)
        if after.differs(before, "snapshots"):
            self.storage.complete(after)
            if self._is_quiet:
                self.storage.pruned(after)
        self._is_quiet = True

    def restarted(self, view: View, coordinator: Coordinator) -> None:
        """A new life of the coordinator serves."""
        self.seen.restarted_at = self._loop.now
        self.seen.heard.clear()
        self.seen.lost.clear()
        self._is_quiet = True
        self._changed(view)
        self.members.restarted(view)
        self.dispatch.restarted(view, now=self._loop.now)
        self.rounds.restarted(view, now=self._loop.now)
        self.storage.complete(view)
        self.weights.restored(coordinator, view)
        self.storage.bounded(self.asked.strategy_of(view, 1))

    def finished(self, view: View, coordinator: Coordinator) -> None:
        """The run is over."""
        self._changed(view)
        self.rows.finished(view)
        self.weights.restored(coordinator, view)
        self.storage.complete(view)
        self.storage.bounded(self.asked.strategy_of(view, 1))
