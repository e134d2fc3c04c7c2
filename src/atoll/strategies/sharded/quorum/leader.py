"""The first rank's second task: it asks who is whole, fixes the set, and has all owners step.

Beside its server, not in its training thread, which may itself be the late one.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from atoll.clock import Clock
from atoll.collectives.base import Handle
from atoll.collectives.exchange import Runner
from atoll.collectives.peers import Peers, answered
from atoll.errors import Accident, AtollError, MissingRanks
from atoll.strategies.sharded.commit import LEADER, Commit, Outcome, Policy
from atoll.strategies.sharded.quorum import messages
from atoll.strategies.sharded.quorum.exchange import void
from atoll.strategies.sharded.quorum.owner import Owner

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # that an owner is asked to wait at a time
T = TypeVar("T")


class Leader:
    """Commits steps, one after another, until the owner is aborted."""

    def __init__(
        self,
        owner: Owner,
        peers: Peers,
        *,
        group: int,
        policy: Policy,
        clock: Clock,
        lanes: Mapping[int, Runner],
    ) -> None:
        """`lanes` carry what is asked of each peer, all at once."""
        self._owner = owner
        self._peers = peers
        self._group = group
        self._policy = policy
        self._clock = clock
        self._lanes = lanes
        self._busy = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Returns when the group is over; why, the owners have been told."""
        try:
            while True:
                self.commit(self._owner.present)
        except AtollError as error:
            self._give_up(error)
        except Exception:
            log.exception("the leader met an unexpected error")
            self._give_up(Accident("the leader of the group met an error of its own"))

    def settle(self) -> None:
        """Returns when no set is fixed that owners still wait for: all have the last step."""
        self._clock.wait_for(
            lambda: not self._busy, self._changed, seconds=3 * self._policy.deadline_seconds
        )

    def _set_busy(self, busy: bool) -> None:
        with self._changed:
            self._busy = busy
            self._changed.notify_all()

    def commit(self, step: int) -> Outcome:
        """One step. The deadline counts from the first sender that is whole here."""
        self._owner.accumulator.wait_arrived(step, enough=1, seconds=None)
        try:
            return self._committed(Commit(step, self._policy))
        finally:
            self._set_busy(False)

    def _committed(self, commit: Commit) -> Outcome:
        step = commit.step
        # Well within the time that a peer is given to answer.
        poll = min(POLL_SECONDS, self._policy.deadline_seconds / 4)
        until = self._clock.now() + self._policy.deadline_seconds
        for owner, senders in self._from_all(lambda k: self._arrived(k, step, until, poll)).items():
            commit.arrived(owner, senders)
        commit.decide(is_late=True)
        self._set_busy(True)
        asked = messages.FoldRequest(
            group=self._group, step=step, senders=tuple(sorted(commit.senders))
        )
        for owner, reply in self._from_all(lambda k: self._fold(k, asked)).items():
            commit.folded(owner, reply.folded())
        outcome = commit.outcome
        assert outcome is not None, commit.stage
        if outcome.excluded:
            about = {"step": step, "excluded": sorted(outcome.excluded)}
            log.warning("a step is committed without late ranks", extra=about)
        update = messages.UpdateRequest.of(self._group, outcome)
        for owner in self._from_all(lambda k: self._update(k, update)):
            commit.updated(owner)
        assert commit.stage == "done", commit.due()
        return outcome

    def _arrived(self, owner: int, step: int, until: float, poll: float) -> frozenset[int]:
        while True:
            left = max(0.0, until - self._clock.now())
            asked = messages.ArrivedRequest(group=self._group, step=step, seconds=min(left, poll))
            if owner == LEADER:
                reply = self._owner.arrived(asked)
            else:
                answer = self._peers.ask(owner, messages.ARRIVED, messages.written(asked))
                reply = messages.read(messages.ArrivedReply, answer)
            if len(reply.senders) == self._policy.size or left == 0:
                return frozenset(reply.senders)

    def _fold(self, owner: int, asked: messages.FoldRequest) -> messages.FoldReply:
        if owner == LEADER:
            return answered(
                lambda _: self._owner.fold(asked),
                rank=LEADER,
                clock=self._clock,
                timeout_seconds=self._policy.deadline_seconds,
            )
        answer = self._peers.ask(owner, messages.FOLD, messages.written(asked))
        return messages.read(messages.FoldReply, answer)

    def _update(self, owner: int, asked: messages.UpdateRequest) -> messages.Done:
        if owner == LEADER:
            return self._owner.update(asked)
        answer = self._peers.ask(owner, messages.UPDATE, messages.written(asked))
        return messages.read(messages.Done, answer)

    def _from_all(self, ask: Callable[[int], T]) -> dict[int, T]:
        """Every owner's answer; the others are asked while this rank's own server works."""
        found: dict[int, T] = {}

        def put(owner: int) -> None:
            found[owner] = ask(owner)

        def asking(owner: int) -> Callable[[], None]:
            return lambda: put(owner)

        handles = [lane.begin(asking(owner)) for owner, lane in self._lanes.items()]
        failed = _errors([_Now(asking(LEADER)), *handles])
        if failed:
            raise failed[0]
        return found

    def _give_up(self, error: AtollError) -> None:
        """Everybody who waits for the step is told, as far as they can be reached."""
        if self._owner.is_over:
            return  # who ended the group tells the others
        about = {"code": error.code, "reason": str(error)}
        log.warning("a step cannot be committed", extra=about)
        self._owner.abort(error)
        ranks = error.ranks if isinstance(error, MissingRanks) else ()
        said = messages.written(
            messages.OverRequest(
                group=self._group,
                step=self._owner.present,
                code=error.code,
                message=str(error),
                ranks=tuple(ranks),
            )
        )

        def tell(owner: int) -> Callable[[], None]:
            return lambda: void(self._peers.ask(owner, messages.OVER, said))

        _errors([lane.begin(tell(owner)) for owner, lane in self._lanes.items()])


class _Now:
    """Work that is done when it is waited for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def _errors(handles: list[Handle]) -> list[AtollError]:
    """What went wrong, after all are over."""
    found = []
    for handle in handles:
        try:
            handle.wait()
        except AtollError as error:
            found.append(error)
    return found
