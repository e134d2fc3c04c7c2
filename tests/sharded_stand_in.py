"""A coordinator of a sharded run in a few lines: what a rank is told, without a ledger or rules.

For tests of the rank's side alone. It keeps everything in memory, believes everybody, and does what
a test asks: ends groups, goes away, lets newcomers in.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory
from atoll.errors import CoordinatorUnreachable, UnknownWorker
from atoll.island.link.rank import Part
from atoll.layout import Layout
from atoll.protocol.exchange import Waiting
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Done,
    HeartbeatReply,
    HeartbeatRequest,
    Info,
    InfoRequest,
    LeaveRequest,
    RegisterReply,
    RegisterRequest,
)
from atoll.protocol.sharded import (
    BoundaryReply,
    BoundaryRequest,
    GroupReply,
    GroupRequest,
    HeldSave,
    Interval,
    MissingReply,
    MissingReport,
    PartReply,
    PartReport,
    RankMember,
    Restore,
    SaveReply,
    SaveReport,
)
from atoll.rows import RowRange
from atoll.strategies.sharded.saves import Chunks
from atoll.sums import digest as digests
from atoll.traffic import Traffic

POLL_SECONDS = 0.05
BLOCK = 8


@dataclass
class Worker:
    """A registered rank."""

    member: RankMember
    incarnation: int
    asks: GroupRequest | None = None  # has no group and wants one


@dataclass
class Formed:
    """A group and what is known of it."""

    number: int
    members: tuple[RankMember, ...]
    restore: Restore
    saves: dict[int, dict[int, HeldSave]] = field(default_factory=lambda: defaultdict(dict))
    parts: dict[int, dict[int, PartReport]] = field(default_factory=lambda: defaultdict(dict))


class StandIn:
    """One coordinator. Forms a group when `wanted` workers ask; for one thread or fibers."""

    def __init__(self, manifest: Manifest, layout: Layout, initial: Tensor, *, wanted: int) -> None:
        self.manifest = manifest
        self.layout = layout
        self.wanted = wanted
        self.is_away = False
        self.workers: dict[str, Worker] = {}
        self.generation = 0
        self.group: Formed | None = None
        self.reasons: list[str] = []  # why groups ended
        self.missing: list[MissingReport] = []
        self.boundaries: dict[int, BoundaryReply] = {}
        self.committed = 0  # rounds
        self.losses: dict[int, PartReport] = {}
        self.blobs: dict[str, bytes] = {}
        self.roots: dict[str, str] = {}  # of saves, by their blobs
        self.spoil: Callable[[str, bytes], bytes] = lambda _, data: data  # what is fetched
        self.initial = self.store(bytes(memory.bytes_of(initial)))
        found = digests.digest(layout, initial)
        self.blobs[found.root] = found.leaves
        self.consistent: tuple[int, int, tuple[str, ...]] | None = None  # step, size, parts
        self.saved_by = 0  # the group that saved the consistent step
        self.checkpoint: tuple[int, int, tuple[str, ...]] | None = None
        self.formed: list[Formed] = []

    def store(self, data: bytes) -> str:
        sha256, chunks = hashlib.sha256(data).hexdigest(), Chunks.of([data])
        self.blobs |= {sha256: data, chunks.root: chunks.encoded()}
        self.roots[sha256] = chunks.root
        return sha256

    # What a test does

    def end_group(self, reason: str) -> None:
        if self.group is not None:
            self.reasons.append(reason)
            self.group = None

    def evict(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)
        self.generation += 1
        self.end_group(f"{worker_id} is gone")

    # Messages

    def answer(self, message: Any) -> Any:
        if self.is_away:
            raise CoordinatorUnreachable("away")
        identity = getattr(message, "identity", None)
        if identity is not None:
            worker = self.workers.get(identity.worker_id)
            if worker is None or worker.incarnation != identity.incarnation:
                raise UnknownWorker(f"{identity.worker_id} is unknown")
        return HANDLERS[type(message)](self, message)

    def info(self, _: InfoRequest) -> Info:
        fields = {name: getattr(self.manifest, name) for name in Manifest.model_fields}
        fields |= {"run_id": "stand-in", "manifest_sha256": self.manifest.sha256()}
        return Info(**fields, model_hash=self.layout.digest, version=0, transfer_port=0)

    def register(self, message: RegisterRequest) -> RegisterReply:
        name = message.worker_id
        if name in self.workers and self.group and name in _names(self.group):
            self.end_group(f"{name} registered again")
        self.generation += 1
        address = f"{message.ip_address}:{message.port}"
        member = RankMember(worker_id=name, address=address, certificate=message.certificate)
        self.workers[name] = Worker(member, self.generation)
        digest = "0" * 64
        return RegisterReply(
            incarnation=self.generation, generation=self.generation, version=0, digest=digest
        )

    def leave(self, message: LeaveRequest) -> Done:
        self.evict(message.identity.worker_id)
        return Done()

    def ask_group(self, message: GroupRequest) -> GroupReply:
        worker = self.workers[message.identity.worker_id]
        if self.group is not None and message.identity.worker_id in _names(self.group):
            if message.group == self.group.number:
                return GroupReply(action="train", group=self.group.number)
            return self._told(self.group)
        if self._is_finished:
            return GroupReply(action="stop")
        if message.group:
            return GroupReply(action="wait", reason=self.reasons[-1])
        worker.asks = message
        asking = sorted(name for name, w in self.workers.items() if w.asks is not None)
        if self.group is not None or len(asking) < self.wanted:
            return GroupReply(action="wait")
        members = tuple(self.workers[name].member for name in asking)
        if any(_measured(self.workers[name]) != self.generation for name in asking):
            return GroupReply(
                action="measure", group=self.generation, members=members, secret="s" * 40
            )
        return self._told(self._form(members))

    @property
    def _is_finished(self) -> bool:
        return self.committed >= self.manifest.stop.rounds

    def _form(self, members: tuple[RankMember, ...]) -> Formed:
        held = [_asked(self.workers[m.worker_id]).held for m in members]
        for member in members:
            self.workers[member.worker_id].asks = None
        self.generation += 1
        self.group = formed = Formed(self.generation, members, self._restore(held))
        self.formed.append(formed)
        self.boundaries.clear()
        return formed

    def _restore(self, held: list[tuple[HeldSave, ...]]) -> Restore:
        if self.consistent is not None:
            step, size, parts = self.consistent
            roots = [{r for save in one for r in (save.own, save.predecessor)} for one in held]
            holders = tuple(
                tuple(rank for rank, has in enumerate(roots) if part in has) for part in parts
            )
            if all(holders) and step >= (self.checkpoint or (0,))[0]:
                return Restore(
                    source="save",
                    step=step,
                    group=self.saved_by,
                    size=size,
                    parts=parts,
                    holders=holders,
                )
        if self.checkpoint is not None:
            step, size, parts = self.checkpoint
            return Restore(
                source="checkpoint",
                step=step,
                size=size,
                parts=parts,
                roots=tuple(self.roots[part] for part in parts),
            )
        return Restore(source="initial", step=0, parts=(self.initial,))

    def _told(self, group: Formed) -> GroupReply:
        return GroupReply(
            action="train",
            group=group.number,
            members=group.members,
            secret="s" * 40,
            restore=group.restore,
            intervals=tuple(self.interval(self.committed + k) for k in (1, 2)),
        )

    def interval(self, number: int) -> Interval:
        steps, batch = self.manifest.sharded.round_steps, self.manifest.inner.batch
        first = (number - 1) * steps
        rows = RowRange("rows", start=first * batch, stop=(first + steps) * batch)
        return Interval(
            round=number,
            first=first + 1,
            last=first + steps,
            ranges=(rows,),
            tokens=first * batch * BLOCK,
            manifest_sha256=self.manifest.sha256(),
        )

    def saved(self, message: SaveReport) -> SaveReply:
        group, save = self.group, message.save
        if group is not None and save.group == group.number:
            known = group.saves[save.step]
            known[save.rank] = save
            size = len(group.members)
            agree = all(known[r].own == known[(r + 1) % size].predecessor for r in known
                        if (r + 1) % size in known)  # fmt: skip
            assert agree, known
            if len(known) == size and save.step >= (self.consistent or (0,))[0]:
                self.consistent = save.step, size, tuple(known[r].own for r in range(size))
                self.saved_by = group.number
        return SaveReply(consistent=self.consistent[0] if self.consistent else 0)

    def part(self, message: PartReport) -> PartReply:
        group = self.group
        if group is not None and message.group == group.number:
            known = group.parts[message.round]
            known[_names(group).index(message.identity.worker_id)] = message
            if len(known) == len(group.members) and message.round == self.committed + 1:
                self.committed = message.round
                blobs = tuple(known[r].blob for r in range(len(known)))
                self.checkpoint = message.step, len(blobs), blobs
                self.losses[message.round] = message
        return PartReply(committed=self.committed >= message.round)

    def boundary(self, message: BoundaryRequest) -> BoundaryReply:
        if message.round not in self.boundaries:
            waiting = any(worker.asks is not None for worker in self.workers.values())
            if message.round >= self.manifest.stop.rounds:
                decided = BoundaryReply(action="stop")
            elif waiting:
                decided = BoundaryReply(action="regroup")
            else:
                decided = BoundaryReply(action="go", interval=self.interval(message.round + 1))
            self.boundaries[message.round] = decided
        decided = self.boundaries[message.round]
        needed = message.round - 1 if decided.action == "go" else message.round
        if self.committed < needed:
            return BoundaryReply(action="wait")
        if decided.action == "regroup":
            self.end_group("somebody waits")
        return decided

    def missed(self, message: MissingReport) -> MissingReply:
        self.missing.append(message)
        return MissingReply()


def _names(group: Formed) -> list[str]:
    return [member.worker_id for member in group.members]


def _asked(worker: Worker) -> GroupRequest:
    assert worker.asks is not None
    return worker.asks


def _measured(worker: Worker) -> int:
    return _asked(worker).measured


HANDLERS: dict[type, Callable[[StandIn, Any], Any]] = {
    InfoRequest: StandIn.info,
    RegisterRequest: StandIn.register,
    LeaveRequest: StandIn.leave,
    GroupRequest: StandIn.ask_group,
    SaveReport: StandIn.saved,
    PartReport: StandIn.part,
    BoundaryRequest: StandIn.boundary,
    MissingReport: StandIn.missed,
    HeartbeatRequest: lambda c, _: HeartbeatReply(generation=c.generation),
}


@dataclass(eq=False)
class StandInLink:
    """A rank's link to it; fulfils `RankLink`."""

    coordinator: StandIn
    clock: Clock
    traffic: Traffic = field(default_factory=Traffic)

    def send(self, message: Any, *, alone: bool = False) -> Any:
        wait_seconds = message.wait_seconds if isinstance(message, Waiting) else 0.0
        deadline = self.clock.now() + wait_seconds
        while True:
            reply = self.coordinator.answer(message)
            if message.is_answered(reply) or self.clock.now() >= deadline:
                return reply
            self.clock.sleep(POLL_SECONDS)

    def upload_part(self, _: Any, part: Part) -> None:
        self.clock.sleep(POLL_SECONDS)
        if self.coordinator.is_away:
            raise CoordinatorUnreachable("away")
        data = part.read(0, part.nbytes)
        assert self.coordinator.store(data) == part.sha256
        assert self.coordinator.roots[part.sha256] == part.root

    def fetch(self, _: Any, sha256: str, *, offset: int, nbytes: int) -> bytes:
        data = self.coordinator.blobs[sha256][offset : offset + nbytes]
        return self.coordinator.spoil(sha256, data)

    def attend(self, identity: Any) -> Any:
        raise AssertionError("nobody attends here")

    upload: Any = attend
    download: Any = attend

    def close(self) -> None:
        """Nothing is open."""


def whole_weights(parts: list[bytes], units: Any, size: int) -> Tensor:
    """The model of a checkpoint's parts, put together by its definition."""
    flat = torch.zeros(units.layout.size)
    for rank, part in enumerate(parts):
        values = torch.frombuffer(bytearray(part), dtype=torch.float32)
        start = 0
        for span in units.owned(rank, size):
            span.of(flat).copy_(values[start : start + len(span)])
            start += len(span)
    return flat
