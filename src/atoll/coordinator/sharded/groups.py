"""Rank groups: how one is formed, who is told what, and when it is over.

A group that trains is durable, its secret is not: a coordinator that starts again knows the group
and tells those in it nothing new; a member that had not learned the secret before makes it end. All
of this is under one lock; the registry decides who is in the run, and who of them is alive.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from atoll.clock import Clock
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.sharded import launches, regions, restoring, suspicion
from atoll.coordinator.sharded.damages import Damages
from atoll.coordinator.sharded.forming import Candidate, Forming
from atoll.coordinator.sharded.intervals import Intervals
from atoll.errors import ProtocolError, StaleGroup
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GroupRecord, RankRecord
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import (
    GroupReply,
    GroupRequest,
    HeldSave,
    MissingReport,
    RankMember,
    Restore,
)

log = logging.getLogger(__name__)

STOPPED = "the operator stops the run"
FINISHED = "the run is finished"


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
    damages: Damages
    changed: Callable[[], None]
    new_secret: Callable[[], str] = lambda: secrets.token_hex(32)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._told: _Told | None = None
        manifest = self.intervals.manifests.first.manifest
        by_launch = manifest.sharded.transport == "torch_dist"
        self.forming = Forming(
            self.registry, self.clock, self.new_secret, self.changed, by_launch=by_launch
        )
        self._missed: dict[str, frozenset[str]] = {}
        self._missed_since = 0.0
        self._missed_changed = 0.0  # when a rank last told something new
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
                self.end(f"{member.worker_id!r} is no longer in the run as it was")
                return

    def end(self, reason: str) -> None:
        """The present group is over; under the lock."""
        assert self._group is not None
        number = self._group.number
        if self._told is not None and self._told.restore.source != "save" and not self._has_saved():
            self.damages.suspect()
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
            self.forming.forget(worker_id)
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
                self.end("a member had not learned the secret before the coordinator restarted")
            if request.group:
                return GroupReply(action="wait")  # its group is over: it asks for another
            if not begun:
                self.forming.note(request)
            reason = self.is_over()
            if reason:
                return GroupReply(action="stop", reason=reason)
            self._form()
            return self._answer_waiting(request)

    def _answer_waiting(self, request: GroupRequest) -> GroupReply:
        group, candidate = self._group, self.forming.candidate
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
        reason = self.stands_still() or "; ".join(self.notes())
        return GroupReply(action="wait", reason=reason)

    def _train(self, group: GroupRecord, told: _Told) -> GroupReply:
        return GroupReply(
            action="train",
            group=group.number,
            members=tuple(map(_dialled, group.members)),
            secret=told.secret,
            restore=told.restore,
            intervals=self.intervals.intervals(),
        )

    def is_over(self) -> str:
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
            if self._group is None and not self.is_over():
                self._form()

    def _form(self) -> None:
        """Moves on towards a group: a candidate, then its pings, then the group."""
        if self._group is not None or self.is_committing():
            return  # what all go back to is about to be newer
        if self.control.command.action != "run":
            return
        if self.stands_still():
            self.forming.drop()
            return
        candidate = self.forming.ready(least=self._least, after=self.number)
        if candidate is None:
            return
        names, asking = candidate.names, self.forming.asking
        pings = {name: asking[name].pings for name in names}
        suspect = suspicion.verdict(suspicion.unreached(names, pings), names)
        self.forming.drop()
        if suspect is not None:
            self._evict(suspect, candidate.members)
        else:
            by_launch = self.forming.by_launch
            self._begin(candidate, names if by_launch else regions.ring(names, pings))

    def _begin(self, candidate: Candidate, ring: list[str]) -> None:
        by_name = {member.worker_id: member for member in candidate.members}
        members = tuple(replace(by_name[name], rank=rank) for rank, name in enumerate(ring))
        restore = self._restore([self.forming.asking[name].held for name in ring])
        number, wall = candidate.number, self.clock.wall()
        record = GroupRecord(number, wall, members, step=restore.step)
        with self.ledger.writing() as t:
            t.groups.form(record)
            t.saves.went_back_to(restore.step)
            self.intervals.hand_over(t, members[0])
        self.intervals.refresh()
        self.number, self._group = number, record
        self._told = _Told(self.new_secret(), restore)
        for name in ring:
            self.forming.forget(name)
        log.info(
            "group formed",
            extra={"group": number, "ring": ring, "from": restore.source, "step": restore.step},
        )
        self.changed()

    def stands_still(self) -> str:
        """Why no group can be formed of those that wait: what they would load is damaged."""
        with self.lock:
            if not self.damages.is_any or self._group is not None or self.is_over():
                return ""
            held = [self.forming.asking[name].held for name in sorted(self.forming.waiting())]
            return self.damages.reason(self._restore(held))

    def _has_saved(self) -> bool:
        """Whether the present group has saved anything: it has come past what it went back to."""
        assert self._group is not None
        with self.ledger.reading() as t:
            found = t.saves.since(self._group.step)
        return any(save.group_number == self._group.number for save in found)

    def _restore(self, held: list[tuple[HeldSave, ...]]) -> Restore:
        with self.ledger.reading() as t:
            checkpoint = t.checkpoints.newest()
            saves = t.saves.since(0 if checkpoint is None else checkpoint.step)
            sizes = {group.number: len(group.members) for group in t.groups.all()}
        saves = self.intervals.reachable(saves)
        found = restoring.from_disks(restoring.consistent(saves, sizes), held)
        if found is None:
            if checkpoint is None:
                return self.initial()
            found = Restore(
                source="checkpoint",
                step=checkpoint.step,
                group=checkpoint.group_number,
                size=len(checkpoint.blobs),
                parts=checkpoint.blobs,
                roots=checkpoint.parts,
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
            told = frozenset(report.missing)
            if self._missed.get(mine.worker_id) != told:
                self._missed[mine.worker_id] = told
                self._missed_changed = self.clock.now()
            about = {"worker": mine.worker_id, "step": report.step, "missing": sorted(told)}
            log.warning("a rank misses others", extra=about)
            self._judge()

    def _judge(self) -> None:
        if self._group is None or not self._missed:
            return
        members = {member.worker_id for member in self._group.members}
        live = self.registry.live() & members
        timeout = self.registry.heartbeats.timeout_seconds
        # The dead among them go by their silence: one that died after it had spoken counts as live
        # until its timeout, and whoever misses it must not go in its place.
        is_time = self.clock.now() - self._missed_since >= timeout
        if (live <= self._missed.keys() or is_time) and all(map(self._is_heard_since, live)):
            suspect = suspicion.verdict(self._missed, live)
            if suspect is not None:
                self._evict(suspect, self._group.members)
            self._refresh()
            if self._group is not None:
                self.end("ranks miss others that are gone")

    def _is_heard_since(self, worker_id: str) -> bool:
        """Whether a rank has given a sign of life after the newest word about who is missed."""
        silent = self.registry.heartbeats.seconds_since(worker_id)
        return silent is not None and silent < self.clock.now() - self._missed_changed

    def _evict(self, worker_id: str, members: tuple[RankRecord, ...]) -> None:
        [life] = [m.incarnation for m in members if m.worker_id == worker_id]
        self.forming.shun(worker_id)
        reason = "other ranks could not reach it"
        if self.registry.evict(worker_id, life, reason=reason):
            self.presence.forget(worker_id, life)
            log.warning("worker evicted", extra={"worker": worker_id, "reason": reason})
        self._refresh()
        self.changed()

    # What others ask

    def newcomers(self) -> bool:
        """Whether anybody waits to be taken into a group; a launch is one, and takes in nobody."""
        with self.lock:
            if self.forming.by_launch:
                return False
            inside = () if self._group is None else self._group.members
            return bool(self.forming.waiting().keys() - {m.worker_id for m in inside})

    def decide(self, *, round_number: int, goes_on: bool) -> GroupRecord:
        """Records what all of the present group are told at the end of a round; under the lock."""
        assert self._group is not None
        with self.ledger.writing() as t:
            t.groups.decide(self._group.number, round_number=round_number, goes_on=goes_on)
        self._group = replace(self._group, decided=round_number, goes_on=goes_on)
        return self._group

    @property
    def _least(self) -> int:
        return self.intervals.manifests.in_force.manifest.membership.min_workers

    def notes(self) -> tuple[str, ...]:
        """Why ranks that ask for a group are in none, where that is not told by who is live."""
        with self.lock:
            number = 0 if self._group is None else self._group.number
            return launches.notes(self.forming.launches(), least=self._least, group=number)

    def waited_for(self) -> tuple[str, ...]:
        """Live workers that a group that is to be formed waits for."""
        with self.lock:
            return () if self.present is not None else self.forming.waited_for()


def _place(group: GroupRecord | Candidate, identity: Identity) -> RankRecord | None:
    """The sender's place, in the life that it had when the group was formed."""
    mine = (identity.worker_id, identity.incarnation)
    return next((m for m in group.members if (m.worker_id, m.incarnation) == mine), None)


def _dialled(member: RankRecord) -> RankMember:
    return RankMember(
        worker_id=member.worker_id, address=member.address, certificate=member.certificate
    )
