"""One peer's way through a fetch: what is known of it so far, and what it is when time is over."""

import random
from dataclasses import dataclass, field

from atoll.errors import AtollError
from atoll.gather.partial import Skipped, shortened
from atoll.gather.peers import Peer
from atoll.gather.spool import Record
from atoll.gather.words import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a fetch waits, in seconds. The defaults fit objects of megabytes on ordinary links."""

    turn_seconds: float = (
        1.0  # the most that a call, and a slow peer's turn, takes while others wait
    )
    longest_turn_seconds: float = 30.0  # for a server that says nothing within a turn
    patience_seconds: float = 10.0  # an object that is not there by then is missing
    first_wait_seconds: float = 0.1  # backoff: each up to twice the one before
    longest_wait_seconds: float = 2.0


@dataclass(slots=True)
class Errand:
    """A peer that is not settled yet. Changed by the one thread that has taken it."""

    peer: Peer
    limit_seconds: float  # of one call
    wait_seconds: float  # the next backoff, at most
    piece_bytes: int  # asked for at a time
    ready_at: float = 0.0
    moved_at: float = 0.0  # when its turn began, or its last piece came
    is_slow: bool = False
    is_known: bool = False  # how quick it is: a piece of it has come, or did not in time
    is_on_trial: bool = False  # taken before that was known
    has_begun: bool = False
    was_missing: bool = False  # its statement was looked for and not there
    found_in_spool: bool = False  # bytes of an earlier life are part of it
    record: Record | None = None
    trouble: AtollError | None = None  # the last thing that happened, while it stands
    trouble_since: float = 0.0
    missed: str = ""  # what was not there, when last looked for
    skipped: Skipped | None = field(default=None)

    def retry(self, now: float, pace: Pace, jitter: random.Random) -> None:
        """Waits before its next turn: peers that lost the same server do not come back in step."""
        self.ready_at = now + self.wait_seconds * (0.5 + jitter.random() / 2)
        self.wait_seconds = min(pace.longest_wait_seconds, self.wait_seconds * 2)

    def failed(self, error: AtollError, now: float) -> None:
        """Its server did not answer, or refused."""
        if self.trouble is None:
            self.trouble_since = now
        self.trouble = error

    def answered(self, pace: Pace) -> None:
        """Its server answered: what went wrong before is over."""
        self.trouble = None
        self.wait_seconds = pace.first_wait_seconds

    def at_deadline(self) -> Skipped:
        """What it is when time is over; nothing here depends on how far it came."""
        uid = self.peer.uid
        if self.trouble is not None:
            return self.away(Reason.SLOW)
        if self.missed:
            return Skipped(uid, Reason.MISSING, f"{uid!r} has no {self.missed}")
        if not self.has_begun:
            return Skipped(uid, Reason.DEADLINE, f"time was over before the turn of {uid!r} came")
        if self.was_missing:
            told = f"the statement of {uid!r} came too late for its object to come by the deadline"
            return Skipped(uid, Reason.LATE, told)
        told = f"the object of {uid!r} did not come whole by the deadline"
        if self.is_slow:
            return Skipped(uid, Reason.SLOW, told)
        return Skipped(uid, Reason.DEADLINE, f"{told}, as fast as others' did")

    def away(self, otherwise: Reason) -> Skipped:
        """Its server is to blame, unless it answered others."""
        server = self.peer.bucket
        told = shortened(f"bucket {server!r}: {type(self.trouble).__doc__} ({self.peer.uid!r})")
        return Skipped(self.peer.uid, Reason.SERVER_AWAY, told, server, otherwise)
