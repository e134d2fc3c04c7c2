"""An owner's side of a quorum, in its server: it takes gradients, adds them up and steps its shard.

Whatever its training thread does, it answers, because threads of the transport do the work. Its
weights have a *version*, the last step that is in them; whoever reads one that is over is told so.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll import errors
from atoll.clock import Clock
from atoll.collectives import memory, schedule
from atoll.collectives.base import Label
from atoll.collectives.mailbox import Bytes
from atoll.collectives.peers import READ_BYTES
from atoll.errors import (
    BlobMissing,
    Forbidden,
    GroupBroken,
    MissingRanks,
    NotReady,
    ProtocolError,
    RoundError,
    StaleContribution,
    StaleGeneration,
    WorkError,
)
from atoll.layout import Span
from atoll.strategies.sharded import tiles
from atoll.strategies.sharded.accumulator import COUNTED, TOTALS_DTYPE, Accumulator, Owned
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.commit import LEADER, Folded, Outcome, Progress
from atoll.strategies.sharded.quorum import messages
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.tiles import Tile
from atoll.sums.partial import PartialSum

OUTCOMES = 64  # steps that are remembered for a training thread that looks late
# What a group was given up for that concerns all of it.
_OF_ALL = (WorkError, RoundError, GroupBroken)
VERSION_SECONDS = 5.0  # that a reader of the next version waits before it asks again


@dataclass(frozen=True)
class Rule:
    """How an owner steps its shard."""

    adamw: AdamW
    clip: float  # the largest norm of a step's mean gradient; 0 clips nothing


class Owner:
    """Fulfils `peers.Desk` and `peers.Source` for one rank of a group. Thread-safe.

    From here on the shard is its own: nobody else writes to it, and nobody reads weights or moments
    but through it, or in `told`.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        group: int,
        version: int,
        trains: Callable[[str], bool],
        micro_batches: int,
        rule: Rule,
        clock: Clock,
        limit_bytes: int | None = None,
        told: Callable[[Outcome], None] = lambda _: None,
        may_fold: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`version` is the last step that is in the shard.

        `told` hears of each step once it is in the shard, in the server's thread, before anybody
        else; nothing of the shard changes until it returns: a save of the step is written there. It
        must not wait by the clock. While `may_fold` says no to a step, whoever leads is asked to
        call again. `limit_bytes` bounds the gradients that wait here; by default to one step's.
        """
        self.shard = shard
        self._group = group
        self._trains = trains
        self._tiles: Sequence[Tile] = tiles.of(shard, trains)
        self._rule = rule
        self._clock = clock
        self._told = told
        self._may_fold = may_fold
        owned = Owned(shard.rank, shard.size, self._spans(), micro_batches, shard.dtype)
        self.accumulator = Accumulator(
            frozenset(range(shard.size)),
            limit_bytes=owned.step_bytes if limit_bytes is None else limit_bytes,
            group=group,
            owned=owned,
            clock=clock,
            first=version + 1,
        )
        self._progress = Progress(version)
        self._work = threading.Lock()  # one fold or update at a time
        self._guard = threading.Lock()  # weights are read or written, a piece at a time
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._published = version  # the last step that `told` has heard of
        self._reached: dict[int, set[int]] = {}  # who has come to the end of a round, by its step
        self._met = 0  # the last one that all have come to
        self._error: Exception | None = None

    def _spans(self) -> dict[int, Span]:
        """This rank's part of each unit that trains, counted in the unit."""
        found = {}
        for unit in self.shard.units.units:
            span = schedule.cut(unit.size, self.shard.size)[self.shard.rank]
            if len(span) and any(self._trains(tensor.name) for tensor in unit.layout.tensors):
                found[unit.number] = span
        return found

    # For this rank's own training

    @property
    def present(self) -> int:
        """The step that is to be computed now."""
        return self._progress.version + 1

    @property
    def is_over(self) -> bool:
        """Whether it was aborted."""
        return self._error is not None

    def check(self, step: int) -> None:
        """StaleContribution for a step that is over; what the group was aborted with."""
        self._check_open()
        self.accumulator.check_present(step)

    def outcome(self, step: int, *, seconds: float) -> Outcome | None:
        """What a step was committed as, once it is in this rank's shard.

        None where that was so long ago that it is forgotten. MissingRanks, naming the leader, when
        the seconds are over.
        """
        if not self._wait(lambda: self._published >= step, seconds):
            raise MissingRanks(
                f"rank {LEADER}, which leads, has not committed step {step} within {seconds:g} s; "
                f"the step is given up",
                ranks=[LEADER],
            )
        return self._outcomes.get(step)

    def wait_met(self, step: int, *, seconds: float) -> None:
        """Returns once all ranks have said that they are at the end of the round of `step`.

        MissingRanks, naming the others, when the seconds are over.
        """
        if self._wait(lambda: self._met >= step, seconds):
            return
        absent = sorted(set(range(self.shard.size)) - self._reached.get(step, set()))
        raise MissingRanks(
            f"ranks {absent} have not come to the end of the round, step {step}, within "
            f"{seconds:g} s of the others; the group is given up",
            ranks=absent,
        )

    def copy(self, unit: int, version: int, out: Tensor) -> None:
        """`out` becomes this rank's part of a unit, in the dtype of `out`."""
        self._check_open()
        whole = Span(0, len(out))
        for piece in schedule.chunks(whole, READ_BYTES // out.element_size()):
            with self._guard:
                self._check_version(version)
                piece.of(out).copy_(piece.of(self.shard.of(unit, "weights")))

    def abort(self, error: Exception) -> None:
        """The group is over: whoever waits here, or will, raises `error`; the first one stands."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.accumulator.abort(error)

    # For all ranks of the group

    def answer(self, sender: int, name: str, body: Bytes) -> bytes:
        with self._speaking():
            return self._answered(sender, name, body)

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Why this rank alone cannot go on is its own matter: others learn that it does not."""
        try:
            yield
        except Exception as error:
            if error is not self._error or isinstance(error, _OF_ALL):
                raise
            raise GroupBroken(f"rank {self.shard.rank} has given the group up") from error

    def _answered(self, sender: int, name: str, body: Bytes) -> bytes:
        self._check_open()
        if name.startswith(messages.REACHED + "/"):
            group, step = messages.reached(name)
            self._check_group(group)
            self.reach(sender, step)
            return messages.written(messages.Done())
        if name.startswith(messages.ADD + "/"):
            return self._add(sender, name, body)
        if sender != LEADER:
            raise Forbidden(f"rank {sender} asks for {name[:40]!r}; rank {LEADER} alone leads")
        if name == messages.ARRIVED:
            return messages.written(self.arrived(messages.read(messages.ArrivedRequest, body)))
        if name == messages.FOLD:
            return messages.written(self.fold(messages.read(messages.FoldRequest, body)))
        if name == messages.UPDATE:
            return messages.written(self.update(messages.read(messages.UpdateRequest, body)))
        if name == messages.OVER:
            return messages.written(self._over(messages.read(messages.OverRequest, body)))
        raise ProtocolError(f"name={name[:80]!r} is nothing that an owner answers")

    def _add(self, sender: int, name: str, body: Bytes) -> bytes:
        label, tokens = messages.added(name)
        dtype = TOTALS_DTYPE if label.key.op == "control" else self.shard.dtype
        if len(body) != len(label.span) * dtype.itemsize or not len(body):
            raise ProtocolError(
                f"{len(body)} bytes came for {len(label.span)} elements of {dtype} ({name[:80]!r})"
            )
        values = memory.tensor_of(body, dtype)
        return self.add(label, sender, PartialSum(values, tokens, COUNTED)).encode()

    def reach(self, rank: int, step: int) -> None:
        """A rank has come to the end of the round of `step`; harmless when repeated.

        NotReady for a step that is still to come here.
        """
        with self._changed:
            if step > self._published:
                raise NotReady(f"step={step} is not in this rank's weights yet; call again")
            if step < self._published or step <= self._met:
                return  # all have come, and may have gone on
            came = self._reached.setdefault(step, set())
            came.add(rank)
            if len(came) == self.shard.size:
                self._met = step
                self._reached.clear()
            self._changed.notify_all()

    def add(self, label: Label, sender: int, part: PartialSum) -> str:
        """As `Accumulator.add`."""
        return self.accumulator.add(label, sender, part)

    def arrived(self, asked: messages.ArrivedRequest) -> messages.ArrivedReply:
        """Who is whole here, when all are or the time is over."""
        self._check_group(asked.group)
        if asked.step > self.present:
            raise NotReady(f"step={asked.step} is still to come, {self.present} is the present one")
        found = self.accumulator.wait_arrived(
            asked.step, enough=self.shard.size, seconds=asked.seconds
        )
        return messages.ArrivedReply(senders=tuple(sorted(found)))

    def fold(self, asked: messages.FoldRequest) -> messages.FoldReply:
        """Adds up over the set, and divides; weights do not change."""
        self._check_group(asked.group)
        senders = frozenset(asked.senders)
        with self._work:
            found = self._progress.may_fold(asked.step, senders)
            if found is None:
                if not self._may_fold(asked.step):
                    raise NotReady(
                        f"rank {self.shard.rank} still writes what it saved before step "
                        f"{asked.step}; call again"
                    )
                found = self._folded(asked.step, senders)
                self._progress.has_folded(senders, found)
        return messages.FoldReply.of(found)

    def _folded(self, step: int, senders: frozenset[int]) -> Folded:
        made = self.accumulator.commit(
            step, senders, into=lambda unit, _: self.shard.of(unit, "sums")
        )
        for unit in made.units:
            self.shard.release_unit(unit, "sums")
        # An empty sum has no mean; the leader refuses it by its count.
        squares = tiles.to_mean(self.shard, self._tiles, made.tokens) if made.tokens else None
        found = 0.0 if squares is None else float(squares.item())
        return Folded(found, made.loss_sum, made.tokens, made.lr)

    def update(self, asked: messages.UpdateRequest) -> messages.Done:
        """Steps this rank's shard with the mean, and publishes the version."""
        self._check_group(asked.group)
        outcome = asked.outcome()
        with self._work:
            if self._progress.may_update(outcome.step, outcome.senders):
                self._updated(outcome)
        return messages.Done()

    def _updated(self, outcome: Outcome) -> None:
        adamw, scale = self._rule.adamw, tiles.clipping(outcome.norm, self._rule.clip)

        def rule(state: tuple[Tensor, ...], decays: bool) -> None:
            adamw.update(state, lr=outcome.lr, step=outcome.step, decays=decays)

        with self._guard:
            tiles.update(self.shard, self._tiles, scale, rule)
            self._progress.has_updated(outcome.step)
        with self._changed:
            self._changed.notify_all()  # readers need not wait for a save
        self._told(outcome)
        with self._changed:
            self._outcomes[outcome.step] = outcome
            self._outcomes.pop(outcome.step - OUTCOMES, None)
            self._published = outcome.step
            self._changed.notify_all()

    def _over(self, asked: messages.OverRequest) -> messages.Done:
        self._check_group(asked.group)
        error = errors.from_code(asked.code, asked.message)
        if isinstance(error, MissingRanks):
            error.ranks = asked.ranks
        self.abort(error)
        return messages.Done()

    # Weights, as other ranks read them

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes of this rank's part of a unit, waited for where it is the next version."""
        with self._speaking():
            yield from self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        group, version, unit, dtype = messages.parameters(name)
        self._check_group(group)
        if unit >= len(self.shard.owned):
            raise BlobMissing(f"unit={unit} is not one of {len(self.shard.owned)} ({name!r})")
        size = len(self.shard.owned[unit]) * dtype.itemsize
        if stop > size:
            raise ProtocolError(f"bytes [{start}, {stop}) are asked of {name!r}, which has {size}")
        if not self._wait(lambda: self._progress.version >= version, VERSION_SECONDS):
            raise NotReady(f"{name!r} is not there, {self._progress.version} is; call again")
        for piece in schedule.chunks(Span(start, stop), READ_BYTES):
            yield self._bytes(unit, version, dtype, piece)
        self.shard.release_unit(unit, "weights")

    def _bytes(self, unit: int, version: int, dtype: torch.dtype, piece: Span) -> bytes:
        item = dtype.itemsize
        elements = Span(piece.start // item, -(-piece.stop // item))
        with self._guard:
            self._check_open()
            self._check_version(version)
            values = elements.of(self.shard.of(unit, "weights")).to(dtype)
            found = bytes(memory.bytes_of(values))
        first = piece.start - elements.start * item
        return found[first : first + len(piece)]

    # Checks

    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether it holds now, or within so many seconds."""
        self._clock.wait_for(
            lambda: self._error is not None or holds(), self._changed, seconds=seconds
        )
        # What is there is there, though the group may be over since.
        if holds():
            return True
        self._check_open()
        return False

    def _check_version(self, version: int) -> None:
        if version != self._progress.version:
            raise StaleContribution(
                f"weights after step {version} are over, step {self.present} is the present one; "
                f"give the step up and go on there"
            )

    def _check_group(self, group: int) -> None:
        if group != self._group:
            raise StaleGeneration(
                f"group={group} of a question is not this rank's, {self._group}",
                present=self._group,
            )

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
