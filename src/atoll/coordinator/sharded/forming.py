"""Who waits for a group, and who is to be the next one: asked, chosen, and pinged by each other.

In memory only: ranks ask again after a restart. Used under the lock of the groups.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.clock import Clock
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.sharded import launches
from atoll.ledger.records import MemberRecord, RankRecord
from atoll.protocol.sharded import MAX_RANKS, GroupRequest, HeldSave, Launch

log = logging.getLogger(__name__)

FORMING_SECONDS = 5.0  # how long enough ranks wait for others that are there and do not ask
MEASURE_SECONDS = 15.0  # a rank that has not pinged the others by then is left out
SHUN_SECONDS = 10.0  # how long a rank is left out that others could not reach; doubles each time
MAX_SHUN_SECONDS = 3600.0
SHUN_HALVES_SECONDS = (
    600.0  # without being shunned again, after which the next time is half as long
)
MAX_AHEAD = 1 << 20  # candidates since the last group; a rank that tells of more is not believed


@dataclass(frozen=True)
class Asking:
    """A rank without a group."""

    incarnation: int
    held: tuple[HeldSave, ...]
    measured: int
    pings: dict[str, float]
    launch: Launch | None


@dataclass(frozen=True)
class Candidate:
    """Those that are to be a group once they have pinged each other."""

    number: int
    members: tuple[RankRecord, ...]  # by worker_id, ranks are not the ring's yet; or a launch
    secret: str
    since: float

    @property
    def names(self) -> list[str]:
        return [member.worker_id for member in self.members]


@dataclass(eq=False)
class Forming:
    """The way to the next group; with `by_launch` it is all processes of one torchrun launch."""

    registry: Registry
    clock: Clock
    new_secret: Callable[[], str]
    changed: Callable[[], None]
    by_launch: bool = False
    candidate: Candidate | None = field(default=None, init=False)
    asking: dict[str, Asking] = field(default_factory=dict, init=False)
    _enough_since: float | None = field(default=None, init=False)
    # Until when, and for how long.
    _shunned: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    def note(self, request: GroupRequest) -> None:
        """A rank asks for a group; ProtocolError for one whose launch does not fit."""
        identity, launch = request.identity, request.launch
        others = self.launches() if self.by_launch else {}
        launches.check(identity.worker_id, launch, others, is_wanted=self.by_launch)
        self.asking[identity.worker_id] = Asking(
            identity.incarnation, request.held, request.measured, dict(request.pings), launch
        )

    def launches(self) -> dict[str, Launch]:
        """The launches of those that ask for a group."""
        told = {name: self.asking[name].launch for name in self.waiting()}
        return {name: launch for name, launch in told.items() if launch is not None}

    def forget(self, worker_id: str) -> None:
        """What the worker asked counts no more."""
        self.asking.pop(worker_id, None)

    def shun(self, worker_id: str) -> None:
        """Leaves a worker out for a while: others could not reach it, and it may be back at once.

        Else it would be a candidate, and evicted, again and again, and nobody would train.
        """
        now = self.clock.now()
        until, before = self._shunned.get(worker_id, (now, SHUN_SECONDS / 2))
        seconds = shunned_seconds(before, quiet_seconds=max(0.0, now - until))
        self._shunned[worker_id] = (now + seconds, seconds)
        self.forget(worker_id)

    def able(self) -> dict[str, MemberRecord]:
        """Live workers that may be taken into a group, whether they ask or not."""
        live, now = self.registry.live(), self.clock.now()
        return {
            m.worker_id: m
            for m in self.registry.generation.members
            if m.worker_id in live and self._shunned.get(m.worker_id, (0.0, 0.0))[0] <= now
        }

    def waiting(self) -> dict[str, MemberRecord]:
        """Those of them that ask for a group, in the life that they asked in."""
        return {
            name: member
            for name, member in self.able().items()
            if name in self.asking and self.asking[name].incarnation == member.incarnation
        }

    def waited_for(self) -> tuple[str, ...]:
        """Live workers that the next group waits for."""
        if self.candidate is None:
            return tuple(sorted(self.able().keys() - self.waiting().keys()))
        return tuple(self._late(self.candidate))

    def ready(self, *, least: int, after: int) -> Candidate | None:
        """Those that have all pinged each other, at least so many; None while there are none.

        Moves on by what was asked and by time. `after` is the number of the newest group.
        """
        waiting = self.waiting()
        if self.candidate is not None and not _are_in(self.candidate, waiting):
            self.candidate = None
        chosen = self._chosen(waiting, least=least)
        if not chosen:
            self._enough_since = None
            return None
        candidate = self.candidate or self._propose(waiting, chosen, after=after)
        if candidate is None:
            return None
        late = self._late(candidate)
        if late and self.clock.now() - candidate.since >= MEASURE_SECONDS:
            # One that takes longer than there is would be late in every candidate. When all are
            # late it is no one's fault, and a launch is nothing without each of its processes.
            everyone = self.by_launch or len(late) == len(candidate.members)
            leave_out = self.forget if everyone else self.shun
            for name in late:
                leave_out(name)
                log.warning("a rank did not ping the others", extra={"worker": name})
            self.candidate = None
            self.changed()
        return None if late else candidate

    def _chosen(self, waiting: dict[str, MemberRecord], *, least: int) -> Sequence[str]:
        """Who can be a group of at least so many; empty: nobody yet."""
        if self.by_launch:
            return launches.chosen(self.launches(), least=least)
        return sorted(waiting)[:MAX_RANKS] if len(waiting) >= least else ()

    def drop(self) -> None:
        """The candidate has become a group, or will not."""
        self.candidate = None

    def _late(self, candidate: Candidate) -> list[str]:
        """Those that have not pinged the others; one that is alone has nobody to ping."""
        if len(candidate.members) == 1:
            return []
        number, asking = candidate.number, self.asking
        return [n for n in candidate.names if n not in asking or asking[n].measured != number]

    def _propose(
        self, waiting: dict[str, MemberRecord], chosen: Sequence[str], *, after: int
    ) -> Candidate | None:
        now = self.clock.now()
        if self._enough_since is None:
            self._enough_since = now
        everybody = waiting.keys() >= self.able().keys()
        if not everybody and now - self._enough_since < FORMING_SECONDS:
            return None
        # Unlike any candidate's before, also of an earlier life: old pings must not count.
        known = max(self.registry.generation.number, after + 1)
        told = (asking.measured for asking in self.asking.values())
        measured = max((number for number in told if number < known + MAX_AHEAD), default=0)
        number = max(known, measured + 1)
        members = tuple(_rank(rank, waiting[name]) for rank, name in enumerate(chosen))
        self.candidate = Candidate(number, members, self.new_secret(), now)
        self._enough_since = None
        log.info("ranks ping each other", extra={"candidate": number, "ranks": len(members)})
        self.changed()
        return self.candidate


def shunned_seconds(before: float, *, quiet_seconds: float) -> float:
    """How long a rank is left out that was left out for `before` seconds the last time.

    `quiet_seconds` have passed since that was over: links that break once a week are no bad ones.
    """
    halved = math.ldexp(2 * before, -int(quiet_seconds // SHUN_HALVES_SECONDS))
    return min(max(halved, SHUN_SECONDS), MAX_SHUN_SECONDS)


def _are_in(candidate: Candidate, waiting: dict[str, MemberRecord]) -> bool:
    """Whether all of a candidate still wait, in the same lives."""
    lives = {name: member.incarnation for name, member in waiting.items()}
    return all(lives.get(m.worker_id) == m.incarnation for m in candidate.members)


def _rank(rank: int, member: MemberRecord) -> RankRecord:
    host = f"[{member.ip_address}]" if ":" in member.ip_address else member.ip_address
    address = f"{host}:{member.port}"
    return RankRecord(rank, member.worker_id, member.incarnation, address, member.certificate)
