"""Ends of rounds: how a group goes on, decided once and told to all of it."""

from dataclasses import dataclass

from atoll.coordinator.members.control import Control
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.intervals import Intervals
from atoll.errors import WrongRound
from atoll.ledger.records import GroupRecord
from atoll.protocol.sharded import BoundaryReply, BoundaryRequest


@dataclass(frozen=True)
class Boundaries:
    """What ranks are told at the end of a round. Thread-safe: under the lock of the groups."""

    groups: Groups
    intervals: Intervals
    control: Control

    def answer(self, request: BoundaryRequest) -> BoundaryReply:
        """How the sender's group goes on after a round; the same for all of it."""
        with self.groups.lock:
            group, number = self.groups.present, request.round
            if group is None or group.number != request.group:
                return self._leave()
            self.groups.member(request.identity, request.group)
            if group.decided < number:
                told = self._decide(number)
                if told is None:
                    return BoundaryReply(action="wait")
                group = told
            if group.decided > number or group.goes_on:
                interval = self.intervals.find(number + 1)
                if interval is None:
                    raise WrongRound(
                        f"round={number} of the boundary was followed by others, which are "
                        f"committed; group {group.number} is past it"
                    )
                return BoundaryReply(action="go", interval=interval)
            if self.intervals.committed < number:
                return BoundaryReply(action="wait")
            if not self.groups.is_over():
                self.groups.end(f"others wait to be taken in after round {number}")
            return self._leave()

    def _leave(self) -> BoundaryReply:
        return BoundaryReply(action="stop" if self.groups.is_over() else "regroup")

    def _decide(self, number: int) -> GroupRecord | None:
        """Decides, once for all, when the round before is committed; None: not yet."""
        if not 1 <= number <= self.intervals.next_commit + self.intervals.asked.lead:
            raise WrongRound(
                f"round={number} of the boundary is not planned; round "
                f"{self.intervals.next_commit} is to be committed next"
            )
        if self.intervals.committed < number - 1 or self.control.command.action == "pause":
            return None
        follows = self.intervals.find(number + 1) is not None
        goes_on = follows and not self.groups.is_over() and not self.groups.newcomers()
        # Durable before the first is told: after a restart all others are told the same.
        return self.groups.decide(round_number=number, goes_on=goes_on)
