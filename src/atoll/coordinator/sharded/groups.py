"""Rank groups: how one is formed, who is told what, and when it is over.

A group that trains is durable, its secret is not: a coordinator that starts again knows the group
and tells those in it nothing new; a member that had not learned the secret before makes it end. All
of this is under one lock; the registry decides who is in the run, and who of them is alive.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace

from atoll.clock import Clock
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.sharded import regions, restoring, suspicion
from atoll.coordinator.sharded.intervals import Intervals
from atoll.errors import ProtocolError, StaleGroup, WrongRound
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GroupRecord, MemberRecord, RankRecord, SaveRecord
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import (
    MAX_RANKS,
    BoundaryReply,
    BoundaryRequest,
    GroupReply,
    GroupRequest,
    HeldSave,
    MissingReport,
    RankMember,
    Restore,
    SaveReply,
    SaveReport,
)

log = logging.getLogger(__name__)

FORMING_SECONDS = 5.0  # how long enough ranks wait for others that are there and do not ask
MEASURE_SECONDS = 15.0  # a rank that has not pinged the others by then is left out
SHUN_SECONDS = 10.0  # how long a rank is left out that others could not reach; doubles each time
MAX_SHUN_SECONDS = 3600.0
STOPPED = "the operator stops the run"
FINISHED = "the run is finished"


@dataclass
class _Asking:
    """A rank without a group."""

    incarnation: int
    held: tuple[HeldSave, ...] = ()
    measured: int = 0
    pings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Candidate:
    """Those that are to be a group once they have pinged each other."""

    number: int
    members: tuple[RankRecord, ...]  # by worker_id; ranks are not the ring's yet
    secret: str
    since: float


@dataclass(frozen=True)
class _Told:
    """What only members of the present group are told, and only this life knows."""

    secret: str
    restore: Restore


@dataclass(eq=False)
class Groups:
    """The present group, and those that wait for one. Thread-safe."""

    ledger: Ledger
    clock: Clock
    registry: Registry
    presence: Presence
    control: Control
    intervals: Intervals
    _: KW_ONLY
    initial: Callable[[], Restore]  # the initial weights, as a restore
    is_committing: Callable[[], bool]  # whether a checkpoint has all parts and is not recorded yet
    changed: Callable[[], None]
    new_secret: Callable[[], str] = lambda: secrets.token_hex(32)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._told: _Told | None = None
        self._asking: dict[str, _Asking] = {}
        self._candidate: _Candidate | None = None
        self._enough_since: float | None = None
        self._missed: dict[str, frozenset[str]] = {}
        self._missed_since = 0.0
        self._shunned: dict[str, tuple[float, float]] = {}  # until when, and for how long
        with self.ledger.reading() as t:
            newest = t.groups.newest()
        self.number = 0 if newest is None else newest.number  # of the newest, over or not
        self._group = None if newest is None or newest.is_over else newest

    # The present group

    @property
    def present(self) -> GroupRecord | None:
        """The group that trains, if there is one."""
        with self.lock:
            self._refresh()
            return self._group

    def member(self, identity: Identity, number: int) -> tuple[GroupRecord, RankRecord]:
        """The group of that number and the sender's place in it; StaleGroup when it is not."""
        group = self.present
        if group is None or group.number != number:
            state = "there is none now" if group is None else f"the present one is {group.number}"
            raise StaleGroup(f"group={number} is over or not begun, {state}; ask for a group")
        found = _place(group, identity)
        if found is None:
            raise StaleGroup(
                f"worker_id={identity.worker_id!r} in incarnation {identity.incarnation} is not "
                f"in group {number}; ask for a group"
            )
        return group, found

    def _refresh(self) -> None:
        """Ends the group of which a member was evicted, has left or registered again."""
        if self._group is None:
            return
        lives = {m.worker_id: m.incarnation for m in self.registry.generation.members}
        for member in self._group.members:
            if lives.get(member.worker_id) != member.incarnation:
                self._end(f"{member.worker_id!r} is no longer in the run as it was")
                return

    def _end(self, reason: str) -> None:
        assert self._group is not None
        number = self._group.number
        with self.ledger.writing() as t:
            t.groups.end(number)
        self._group = self._told = None
        self._missed.clear()
        log.info("group over", extra={"group": number, "reason": reason})
        self.changed()

    # Asking for a group

    def forget(self, worker_id: str) -> None:
        """A new life of the worker began: what an earlier one asked counts no more."""
        with self.lock:
            self._asking.pop(worker_id, None)
            self._refresh()

    def answer(self, request: GroupRequest, *, begun: bool) -> GroupReply:
        """Which group the sender is in; `begun` says that it is looked at again."""
        identity = request.identity
        with self.lock:
            group = self.present
            if group is not None and _place(group, identity) is not None:
                if request.group == group.number:
                    return GroupReply(action="train", group=group.number)
                if self._told is not None:
                    return self._train(group, self._told)
                self._end("a member had not learned the secret before the coordinator restarted")
            if request.group:
                return GroupReply(action="wait")  # its group is over: it asks for another
            if not begun:
                self._note(request)
            reason = self._is_over()
            if reason:
                return GroupReply(action="stop", reason=reason)
            self._form()
            return self._answer_waiting(request)

    def _answer_waiting(self, request: GroupRequest) -> GroupReply:
        group, candidate = self._group, self._candidate
        if group is not None and self._told is not None and _place(group, request.identity):
            return self._train(group, self._told)
        if candidate is not None and _place(candidate, request.identity) is not None:
            members = tuple(map(_dialled, candidate.members))
            return GroupReply(
                action="measure",
                group=candidate.number,
                members=members,
                secret=candidate.secret,
            )
        return GroupReply(action="wait")

    def _train(self, group: GroupRecord, told: _Told) -> GroupReply:
        return GroupReply(
            action="train",
            group=group.number,
            members=tuple(map(_dialled, group.members)),
            secret=told.secret,
            restore=told.restore,
            intervals=self.intervals.intervals(),
        )

    def _note(self, request: GroupRequest) -> None:
        identity = request.identity
        self._asking[identity.worker_id] = _Asking(
            identity.incarnation, request.held, request.measured, dict(request.pings)
        )

    def _is_over(self) -> str:
        """Why nobody trains any more; empty while the run goes on."""
        if self.intervals.is_finished():
            return FINISHED
        return STOPPED if self.control.command.action == "stop" else ""

    # Forming one

    def advance(self) -> None:
        """Does what only time brings: forms a group, leaves out who is late, evicts suspects."""
        with self.lock:
            self._refresh()
            self._judge()
            if self._group is None and not self._is_over():
                self._form()

    def _able(self) -> dict[str, MemberRecord]:
        """Live workers that may be taken into a group, whether they ask or not."""
        live, now = self.registry.live(), self.clock.now()
        return {
            m.worker_id: m
            for m in self.registry.generation.members
            if m.worker_id in live and self._shunned.get(m.worker_id, (0.0, 0.0))[0] <= now
        }

    def _waiting(self) -> dict[str, MemberRecord]:
        """Those of them that ask for a group and are in none."""
        inside = set() if self._group is None else {m.worker_id for m in self._group.members}
        return {
            name: member
            for name, member in self._able().items()
            if name not in inside
            and name in self._asking
            and self._asking[name].incarnation == member.incarnation
        }

    def _form(self) -> None:
        """Moves on towards a group: a candidate, then its pings, then the group."""
        if self._group is not None or self.is_committing():
            return  # what all go back to is about to be newer
        if self.control.command.action != "run":
            return
        waiting = self._waiting()
        candidate = self._candidate
        if candidate is not None and not _are_in(candidate, waiting):
            candidate = self._candidate = None
        least = self._min_workers()
        if len(waiting) < least:
            self._enough_since = None
            return
        if candidate is None:
            candidate = self._propose(waiting)
        if candidate is not None:
            self._measured(candidate)

    def _min_workers(self) -> int:
        """How many ranks a group needs under the manifest in force."""
        return self.intervals.manifests.in_force.manifest.membership.min_workers

    def _propose(self, waiting: dict[str, MemberRecord]) -> _Candidate | None:
        now = self.clock.now()
        if self._enough_since is None:
            self._enough_since = now
        everybody = waiting.keys() >= self._able().keys()
        if not everybody and now - self._enough_since < FORMING_SECONDS:
            return None
        chosen = sorted(waiting)[:MAX_RANKS]
        # Unlike any candidate's before, also of an earlier life: old pings must not count.
        measured = max((asking.measured for asking in self._asking.values()), default=0)
        number = max(self.registry.generation.number, self.number + 1, measured + 1)
        members = tuple(_rank(rank, waiting[name]) for rank, name in enumerate(chosen))
        self._candidate = _Candidate(number, members, self.new_secret(), now)
        self._enough_since = None
        log.info("ranks ping each other", extra={"candidate": number, "ranks": len(members)})
        self.changed()
        return self._candidate

    def _measured(self, candidate: _Candidate) -> None:
        """Forms the group once all have pinged; leaves out who has not in time."""
        names = [member.worker_id for member in candidate.members]
        alone = len(names) == 1
        late = [n for n in names if self._asking[n].measured != candidate.number and not alone]
        if late:
            if self.clock.now() - candidate.since >= MEASURE_SECONDS:
                for name in late:
                    del self._asking[name]
                    log.warning("a rank did not ping the others", extra={"worker": name})
                self._candidate = None
                self.changed()
            return
        pings = {name: self._asking[name].pings for name in names}
        missed = {} if alone else suspicion.unreached(names, pings)
        suspect = suspicion.verdict(missed, names)
        if suspect is not None:
            self._candidate = None
            self._evict(suspect, candidate.members)
            return
        self._begin(candidate, regions.ring(names, pings))

    def _begin(self, candidate: _Candidate, ring: list[str]) -> None:
        by_name = {member.worker_id: member for member in candidate.members}
        members = tuple(replace(by_name[name], rank=rank) for rank, name in enumerate(ring))
        restore = self._restore([self._asking[name].held for name in ring])
        number, wall = candidate.number, self.clock.wall()
        record = GroupRecord(number, wall, members, step=restore.step)
        with self.ledger.writing() as t:
            t.groups.form(record)
            self.intervals.hand_over(t, members[0])
        self.intervals.refresh()
        self.number, self._group = number, record
        self._told = _Told(self.new_secret(), restore)
        self._candidate = None
        for name in ring:
            del self._asking[name]
        log.info(
            "group formed",
            extra={"group": number, "ring": ring, "from": restore.source, "step": restore.step},
        )
        self.changed()

    def _restore(self, held: list[tuple[HeldSave, ...]]) -> Restore:
        with self.ledger.reading() as t:
            checkpoint = t.checkpoints.newest()
            saves = t.saves.since(0 if checkpoint is None else checkpoint.step)
            sizes = {group.number: len(group.members) for group in t.groups.all()}
        found = restoring.from_disks(restoring.consistent(saves, sizes), held)
        if found is None:
            if checkpoint is None:
                return self.initial()
            found = Restore(
                source="checkpoint",
                step=checkpoint.step,
                size=len(checkpoint.blobs),
                parts=checkpoint.blobs,
            )
        return found.model_copy(update={"tokens": self.intervals.tokens_at(found.step)})

    # Ranks that do not reach each other

    def missing(self, report: MissingReport) -> None:
        """A rank misses others of its group; who goes is decided once all that live have spoken."""
        with self.lock:
            group, mine = self.member(report.identity, report.group)
            others = {m.worker_id for m in group.members} - {mine.worker_id}
            for name in sorted(set(report.missing) - others):
                raise ProtocolError(
                    f"missing={name!r} is not another member of group {group.number}; name those "
                    f"that were waited for"
                )
            if not self._missed:
                self._missed_since = self.clock.now()
            self._missed[mine.worker_id] = frozenset(report.missing)
            log.warning(
                "a rank misses others",
                extra={"worker": mine.worker_id, "missing": sorted(report.missing)},
            )
            self._judge()

    def _judge(self) -> None:
        if self._group is None or not self._missed:
            return
        members = {member.worker_id for member in self._group.members}
        live = self.registry.live() & members
        timeout = self.registry.heartbeats.timeout_seconds
        # The dead among them go by their silence.
        is_time = self.clock.now() - self._missed_since >= timeout
        if live <= self._missed.keys() or is_time:
            suspect = suspicion.verdict(self._missed, live)
            if suspect is not None:
                self._evict(suspect, self._group.members)
            self._refresh()
            if self._group is not None:
                self._end("ranks miss others that are gone")

    def _evict(self, worker_id: str, members: tuple[RankRecord, ...]) -> None:
        [life] = [m.incarnation for m in members if m.worker_id == worker_id]
        seconds = min(
            2 * self._shunned.get(worker_id, (0.0, SHUN_SECONDS / 2))[1], MAX_SHUN_SECONDS
        )
        self._shunned[worker_id] = (self.clock.now() + seconds, seconds)
        reason = "other ranks could not reach it"
        if self.registry.evict(worker_id, life, reason=reason):
            self.presence.forget(worker_id, life)
            log.warning("worker evicted", extra={"worker": worker_id, "reason": reason})
        self._asking.pop(worker_id, None)
        self._refresh()
        self.changed()

    # Saves

    def saved(self, report: SaveReport) -> SaveReply:
        """Records a save; the newest step that all of the group have saved."""
        save = report.save
        with self.lock:
            group, mine = self.member(report.identity, save.group)
            self._check_save(save, group, mine)
            with self.ledger.writing() as t:
                t.saves.add(
                    SaveRecord(save.group, save.step, mine.rank, save.own, save.predecessor)
                )
                found = t.saves.since(group.step)
            return SaveReply(consistent=_newest_of(group, found))

    def _check_save(self, save: HeldSave, group: GroupRecord, mine: RankRecord) -> None:
        if save.rank != mine.rank:
            raise ProtocolError(
                f"rank={save.rank} of the save is not the sender's in group {group.number}, which "
                f"is {mine.rank}; report its own shard"
            )
        every = self.intervals.asked.manifest.sharded.save_every
        planned = [interval.last for interval in self.intervals.intervals()]
        if save.step % every or not max(1, group.step) <= save.step <= max(planned, default=0):
            raise WrongRound(
                f"step={save.step} of the save is none that group {group.number} saves: every "
                f"{every} steps from {group.step} on, up to {max(planned, default=0)}"
            )

    def consistent(self) -> int:
        """The newest step that all of the present group have saved; 0: none."""
        with self.lock:
            group = self.present
            if group is None:
                return 0
            with self.ledger.reading() as t:
                found = t.saves.since(group.step)
        return _newest_of(group, found)

    def waited_for(self) -> tuple[str, ...]:
        """Live workers that a group that is to be formed waits for."""
        with self.lock:
            if self.present is not None:
                return ()
            candidate = self._candidate
            if candidate is None:
                return tuple(sorted(self._able().keys() - self._waiting().keys()))
            names = (member.worker_id for member in candidate.members)
            asking = self._asking
            return tuple(n for n in names if asking[n].measured != candidate.number)

    # Ends of rounds

    def boundary(self, request: BoundaryRequest) -> BoundaryReply:
        """How the sender's group goes on after a round; the same for all of it."""
        with self.lock:
            group, number = self.present, request.round
            if group is None or group.number != request.group:
                return self._leave()
            self.member(request.identity, request.group)
            if group.decided < number:
                told = self._decide(group, number)
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
            if not self._is_over():
                self._end(f"others wait to be taken in after round {number}")
            return self._leave()

    def _leave(self) -> BoundaryReply:
        return BoundaryReply(action="stop" if self._is_over() else "regroup")

    def _decide(self, group: GroupRecord, number: int) -> GroupRecord | None:
        """Decides, once for all, when the round before is committed; None: not yet."""
        if not 1 <= number <= self.intervals.next_commit + self.intervals.asked.lead:
            raise WrongRound(
                f"round={number} of the boundary is not planned; round "
                f"{self.intervals.next_commit} is to be committed next"
            )
        if self.intervals.committed < number - 1 or self.control.command.action == "pause":
            return None
        follows = self.intervals.find(number + 1) is not None
        goes_on = follows and not self._is_over() and not self._waiting()
        # Durable before the first is told: after a restart all others are told the same.
        with self.ledger.writing() as t:
            t.groups.decide(group.number, round_number=number, goes_on=goes_on)
        self._group = replace(group, decided=number, goes_on=goes_on)
        return self._group


def _newest_of(group: GroupRecord, saves: Iterable[SaveRecord]) -> int:
    """The newest step of `saves` that is consistent in this group; 0: none is."""
    ours = [one for one in saves if one.group_number == group.number]
    found = restoring.consistent(ours, {group.number: len(group.members)})
    return next((step[0].step for step in found), 0)


def _place(group: GroupRecord | _Candidate, identity: Identity) -> RankRecord | None:
    """The sender's place, in the life that it had when the group was formed."""
    mine = (identity.worker_id, identity.incarnation)
    return next((m for m in group.members if (m.worker_id, m.incarnation) == mine), None)


def _are_in(candidate: _Candidate, waiting: dict[str, MemberRecord]) -> bool:
    """Whether all of a candidate still wait, in the same lives."""
    lives = {name: member.incarnation for name, member in waiting.items()}
    return all(lives.get(m.worker_id) == m.incarnation for m in candidate.members)


def _rank(rank: int, member: MemberRecord) -> RankRecord:
    host = f"[{member.ip_address}]" if ":" in member.ip_address else member.ip_address
    address = f"{host}:{member.port}"
    return RankRecord(rank, member.worker_id, member.incarnation, address, member.certificate)


def _dialled(member: RankRecord) -> RankMember:
    return RankMember(
        worker_id=member.worker_id, address=member.address, certificate=member.certificate
    )
