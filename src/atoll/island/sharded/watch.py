"""A rank's place in a group: from entering it until the coordinator says that it is over."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from atoll.clock import Clock
from atoll.collectives.peers import Peers
from atoll.errors import AtollError, MissingRanks, StaleGeneration, StaleGroup
from atoll.island.driver import Over
from atoll.island.sharded.errands import Spawn
from atoll.island.sharded.talk import Talk
from atoll.protocol.sharded import GroupReply, GroupRequest, MissingReport

log = logging.getLogger(__name__)

WAIT_SECONDS = 20.0  # a long poll; well below any proxy's idle limit
AGAIN_SECONDS = 5.0  # until ranks that are still missed are named once more


class Place:
    """This rank in the group that was `formed`; something beside the training watches over it.

    When the coordinator says that the group is over, all collectives raise StaleGeneration at once.
    """

    def __init__(
        self, formed: GroupReply, rank: int, peers: Peers, *, talk: Talk, clock: Clock, spawn: Spawn
    ) -> None:
        self.formed = formed
        self.rank = rank
        self.peers = peers
        self._clock = clock
        self._changed = threading.Condition()
        self._is_left = False  # nobody wants to know any more
        self._is_over = False
        self._unheard: AtollError | None = None  # why nobody watches any more
        self._error: Exception | None = None
        self._failing: list[Callable[[Exception], None]] = []
        self.talk = talk.until(lambda: self._is_left)
        spawn(f"watch-{formed.group}", self._watch)

    @property
    def number(self) -> int:
        """The group's."""
        return self.formed.group

    @property
    def size(self) -> int:
        return len(self.formed.members)

    @property
    def is_over(self) -> bool:
        """Whether the coordinator has ended the group, or this rank has left it."""
        return self._is_over or self._is_left

    def check(self) -> None:
        """Raises why this rank cannot go on in the group, if it cannot."""
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._is_over and not self._is_left:
                reply = self.talk.ask(
                    lambda who: GroupRequest(
                        identity=who, group=self.number, wait_seconds=WAIT_SECONDS
                    )
                )
                if reply.action == "stop" or reply.group != self.number:
                    self._end(reply)
        except Over:
            return
        except AtollError as error:
            # Whatever it is, this rank cannot be told that its group is over: it must not go on.
            with self._changed:
                self._unheard = error
                self._changed.notify_all()
            self.fail(error)

    def _end(self, reply: GroupReply) -> None:
        about = {"group": self.number, "reason": reply.reason}
        if not self._is_left:
            log.warning("the group is over", extra=about)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self.fail(
            StaleGeneration(
                f"group={self.number} is over: {reply.reason or reply.action}; what is not saved "
                f"of it is made again",
                present=reply.group,
            )
        )

    def fail(self, error: Exception) -> None:
        """Whoever waits for other ranks of this group raises `error`; the first one stands."""
        self._error = self._error or error
        self.peers.abort(error)
        for act in self._failing:
            act(error)

    def on_fail(self, act: Callable[[Exception], None]) -> None:
        """`act` is told why this rank cannot go on, now or when it comes to that, maybe twice."""
        self._failing.append(act)
        if self._error is not None:
            act(self._error)

    def await_end(self, error: AtollError, *, step: int) -> bool:
        """Whether the coordinator has ended the group; tells it whom this rank misses.

        `step` is the one that was under way. False when `error` names nobody and the group goes on
        for a while: nobody else may ever end it, so that is this rank's to do.

        Raises why it cannot be told of the end, such as Forbidden for a rank that was kicked.
        """
        missed = [r for r in _missing(error) if r != self.rank]  # this rank may be the late one
        missing = [self.formed.members[r].worker_id for r in missed]
        while not self._is_over:
            if self._unheard is not None:
                raise self._unheard
            if missing:
                log.warning("ranks are missing", extra={"group": self.number, "missing": missing})
                with suppress(StaleGroup):  # over already: the one who watches is about to hear it
                    self.talk.ask(
                        lambda who: MissingReport(
                            identity=who, group=self.number, step=step, missing=tuple(missing)
                        )
                    )
            self._clock.wait_for(
                lambda: self._is_over or self._unheard is not None,
                self._changed,
                seconds=AGAIN_SECONDS,
            )
            if not missing and self._unheard is None:
                break
        return self._is_over

    def leave(self) -> None:
        """This rank is in the group no longer."""
        with self._changed:
            self._is_left = True
            self._changed.notify_all()
        self.peers.close()


def _missing(error: AtollError) -> tuple[int, ...]:
    return error.ranks if isinstance(error, MissingRanks) else ()
