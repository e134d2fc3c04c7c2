"""Why a peer is left out of a window: one word each, whose fault it is, and the error that says so.

The words stand in results, logs and metrics, so each is stable. Decides nothing: whoever meets the
trouble chooses the word.
"""

from enum import StrEnum
from typing import Literal

from atoll.errors import AtollError

Fault = Literal["peer", "ours"]


class Reason(StrEnum):
    """Why a peer is skipped. What is ours says nothing against the peer."""

    MISSING = "MISSING"  # no statement, or no object where it points
    LATE = "LATE"  # its statement came after the deadline
    SLOW = "SLOW"  # its object did not come whole by the peer's deadline
    SIZE = "SIZE"  # another number of bytes than the run's layout and codec give
    SIGNATURE = "SIGNATURE"  # not signed by the peer's key
    STATEMENT = "STATEMENT"  # no statement of this run, manifest, uid, window and base
    FRAME = "FRAME"  # no frame, another's, or not the bytes that the statement names
    INDICES = "INDICES"  # indices repeat, fall, run over the end, or their padding is not zero
    TABLE = "TABLE"  # magnitudes that are not finite or not in order
    NORM = "NORM"  # values larger than the run's bound
    CHANGED = "CHANGED"  # the object was replaced while it was read
    CONFLICT = "CONFLICT"  # two statements, or two objects, for one window
    COPY = "COPY"  # another peer's values; left out where the run says so
    SERVER_AWAY = "SERVER_AWAY"  # a bucket's server answers nobody
    DISK_FULL = "DISK_FULL"  # no room to keep the object
    DEADLINE = "DEADLINE"  # our time was over before the peer's turn came

    @property
    def fault(self) -> Fault:
        """Whose fault it is: the peer's, or ours."""
        return "ours" if self in _OURS else "peer"


_OURS = frozenset({Reason.SERVER_AWAY, Reason.DISK_FULL, Reason.DEADLINE})


class Skip(AtollError, code=None):
    """A peer is left out of the window; `reason` is what is counted, `sentence` what is read."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
