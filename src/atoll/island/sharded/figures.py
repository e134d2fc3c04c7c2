"""What a rank tells about its steps beside what every island tells."""

import logging
from dataclasses import dataclass

from atoll.protocol.messages import Telemetry
from atoll.strategies.sharded.seconds import Split
from atoll.traffic import Traffic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missed:
    """A step that was committed without this rank, which computed it."""

    step: int
    present: int  # the one that it goes on with


class Figures:
    """Where the time of this process's steps went, and how many of them were for nothing.

    For the thread that trains; the one that beats reads `added`, and what that reads is replaced
    whole.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._seconds = Split()
        self._reached = 0  # the last step that this process has made or restored
        self._rolled_back = 0
        self._late = 0

    @property
    def under_way(self) -> int:
        """The step after the last one that is made."""
        return self._reached + 1

    def made(self, step: int, seconds: Split) -> None:
        """A step is in the weights."""
        self._reached = step
        self._seconds += seconds

    def missed(self, missed: Missed) -> None:
        """A step was committed without this rank, and maybe others after it."""
        self._reached = missed.present - 1
        self._late += 1

    def went_back_to(self, step: int, *, group: int) -> None:
        """A group begins with the weights after `step`; what was made since is made again."""
        lost = self._reached - step
        if lost > 0:
            self._rolled_back += lost
            about = {"group": group, "reached": self._reached, "step": step, "lost": lost}
            log.warning("steps are rolled back", extra=about)
        self._reached = step

    def added(self, told: Telemetry) -> Telemetry:
        """`told`, and what is known here."""
        spent = self._seconds
        return told.model_copy(
            update={
                "gather_seconds": spent.gather,
                "compute_seconds": spent.compute,
                "reduce_seconds": spent.reduce,
                "step_seconds": spent.step,
                "rank_bytes_sent": self._traffic.sent,
                "rank_bytes_received": self._traffic.received,
                "rolled_back_steps": self._rolled_back,
                "late_steps": self._late,
            }
        )
