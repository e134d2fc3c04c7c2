"""What other ranks' gradients of a step wait in at the rank that owns them, until it is committed.

Nothing is added up as it comes, because who is in a step's sum is known at its end alone. A part is
known by group, step, micro-batch, span and sender: the same one again changes nothing. It holds one
step, so its memory is what all senders' parts of a step take; parts of later steps may have what
the limit leaves, and else wait with their sender. A micro-batch ends with its *totals*, the summed
loss and the step's learning rate, which also say how many tokens a sender counts where an owner has
no element of the model.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import schedule
from atoll.collectives.base import Key, Label
from atoll.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleContribution,
    StaleGeneration,
)
from atoll.layout import Span
from atoll.sums.partial import PartialSum

COUNTED = "tokens"
TOTALS = Span(0, 2)  # of a micro-batch's totals: summed loss, learning rate
TOTALS_DTYPE = torch.float64

_Place = tuple[int, int | None]  # micro-batch, and unit; None: its totals


@dataclass(frozen=True)
class Owned:
    """What one rank of a group collects of every sender at every step."""

    rank: int
    size: int
    spans: Mapping[int, Span]  # of the units that train, in the unit; none is empty
    micro_batches: int
    dtype: torch.dtype = torch.float32

    @property
    def elements(self) -> int:
        """That one sender's micro-batch has here."""
        return sum(len(span) for span in self.spans.values())

    @property
    def step_bytes(self) -> int:
        """Of all senders' parts of a step."""
        of_micro = self.elements * self.dtype.itemsize + len(TOTALS) * TOTALS_DTYPE.itemsize
        return self.size * self.micro_batches * of_micro


@dataclass(frozen=True)
class Committed:
    """A step's sums over some senders."""

    units: Mapping[int, PartialSum]
    loss_sum: float
    tokens: int  # the count of every unit's sum
    lr: float  # that all of them say


def totals(
    group: int, step: int, micro: int, *, loss_sum: float, lr: float, tokens: int
) -> tuple[Label, PartialSum]:
    """What ends a micro-batch."""
    said = torch.tensor([loss_sum, lr], dtype=TOTALS_DTYPE)
    label = Label(Key(group, step, "control", micro), 0, TOTALS)
    return label, PartialSum(said, tokens, COUNTED)


def totals_order(size: int) -> list[int]:
    """In which losses are added: that of an all-reduce of loss and tokens, whose first it is."""
    part = next(k for k, span in enumerate(schedule.cut(2, size)) if span.start <= 0 < span.stop)
    return schedule.order(part, size)


class _Sent:
    """What one sender has sent of one step."""

    def __init__(self, left: int) -> None:
        self.left = left  # elements and totals that are still to come
        self.counts: dict[int, int] = {}  # by micro-batch
        self.parts: dict[_Place, dict[int, PartialSum]] = {}  # by where they start
        self._starts: dict[_Place, list[int]] = {}

    def known(self, place: _Place, span: Span) -> PartialSum | None:
        """What came for this very span; Conflict where another one reaches into it."""
        starts, parts = self._starts.get(place, []), self.parts.get(place, {})
        at = bisect_left(starts, span.start)
        for start in starts[max(0, at - 1) : at + 1]:
            stop = start + len(parts[start].total)
            if (start, stop) == (span.start, span.stop):
                return parts[start]
            if start < span.stop and span.start < stop:
                raise Conflict(
                    f"elements [{span.start}, {span.stop}) of {_told(place)} reach into "
                    f"[{start}, {stop}), which came before; a sender cuts its parts one way"
                )
        return None

    def put(self, place: _Place, span: Span, part: PartialSum) -> None:
        self.counts[place[0]] = part.count
        self.parts.setdefault(place, {})[span.start] = part
        starts = self._starts.setdefault(place, [])
        starts.insert(bisect_left(starts, span.start), span.start)
        self.left -= len(span)

    @property
    def nbytes(self) -> int:
        return sum(p.total.nbytes for parts in self.parts.values() for p in parts.values())


class Accumulator:
    """The accumulator of one owner. Thread-safe; waits by its clock, so fibers may use it.

    After a refusal all is as it was.
    """

    def __init__(
        self,
        expected: frozenset[int],
        *,
        limit_bytes: int,
        group: int,
        owned: Owned,
        clock: Clock,
        first: int = 1,
        wait_seconds: float = 10.0,
    ) -> None:
        """`first` is the step that comes first; `wait_seconds`, how long a part waits for room."""
        if limit_bytes < owned.step_bytes:
            raise ConfigError(
                f"limit_bytes={limit_bytes} is less than the {owned.step_bytes} that "
                f"{owned.size} ranks' parts of a step take at their owner; no step would be whole"
            )
        self._expected = expected
        self.limit_bytes = limit_bytes
        self._group = group
        self._owned = owned
        self._clock = clock
        self._step = first  # the present one: those before are over
        self._wait_seconds = wait_seconds
        self._sent: dict[tuple[int, int], _Sent] = {}  # by step and sender
        self._later_bytes = 0  # of steps that are still to come
        self._error: Exception | None = None
        self.changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Of the parts that it holds."""
        with self.changed:
            return sum(sent.nbytes for sent in self._sent.values())

    @property
    def step(self) -> int:
        """The present one."""
        return self._step

    # Senders' side

    def add(self, label: Label, sender: int, part: PartialSum) -> Literal["taken", "repeated"]:
        """Takes a copy of a sender's part of a unit, or of a micro-batch's totals.

        Forbidden for who is not expected, StaleGeneration for another group, StaleContribution for
        a step that is over, ProtocolError for what no rank sends, Conflict for other values where
        some came before. NotReady after waiting for room.
        """
        place = self._check(label, sender, part)
        key = label.key

        def settled() -> bool:
            is_over = self._error is not None or key.group != self._group
            return is_over or key.step <= self._step or self._has_room(part.total.nbytes)

        self._clock.wait_for(settled, self.changed, seconds=self._wait_seconds)
        with self.changed:
            self._check(label, sender, part)
            sent = self._sent.get((key.step, sender)) or self._nothing()
            known = sent.known(place, label.span)
            if known is not None:
                _check_same(known, part, label)
                return "repeated"
            _check_count(sent, part, label)
            if key.step > self._step and not self._has_room(part.total.nbytes):
                raise NotReady(
                    f"step={key.step} is still to come, this owner is at {self._step} and has no "
                    f"room for more; call again"
                )
            self._sent[key.step, sender] = sent
            sent.put(place, label.span, PartialSum(part.total.clone(), part.count, part.unit))
            if key.step > self._step:
                self._later_bytes += part.total.nbytes
            self.changed.notify_all()
        return "taken"

    def _nothing(self) -> _Sent:
        return _Sent(self._owned.micro_batches * (self._owned.elements + len(TOTALS)))

    def _has_room(self, nbytes: int) -> bool:
        """For a later step: what the present one takes is kept free for it."""
        return self._later_bytes + nbytes <= self.limit_bytes - self._owned.step_bytes

    def _check(self, label: Label, sender: int, part: PartialSum) -> _Place:
        self.check_open()
        key, span = label.key, label.span
        if sender not in self._expected:
            raise Forbidden(
                f"sender={sender} has no part in this sum; ranks {sorted(self._expected)} have"
            )
        if key.group != self._group:
            raise StaleGeneration(
                f"group={key.group} of a part is not this owner's, {self._group}; ask the "
                f"coordinator for the present one",
                present=self._group,
            )
        self.check_present(key.step)
        if not 0 <= key.micro < self._owned.micro_batches:
            raise ProtocolError(
                f"micro={key.micro} is not one of a step's {self._owned.micro_batches} "
                f"micro-batches"
            )
        is_totals = key.op == "control"
        whole = TOTALS if is_totals else self._owned.spans.get(key.unit, Span(0, 0))
        if not (len(span) and whole.start <= span.start and span.stop <= whole.stop):
            raise ProtocolError(
                f"elements [{span.start}, {span.stop}) of unit {key.unit} are not this owner's, "
                f"[{whole.start}, {whole.stop}); send them to who owns them"
            )
        dtype = TOTALS_DTYPE if is_totals else self._owned.dtype
        if part.total.shape != (len(span),) or part.total.dtype != dtype or part.unit != COUNTED:
            raise ProtocolError(
                f"a part of {tuple(part.total.shape)} {part.total.dtype}, counted in "
                f"{part.unit!r}, came for {len(span)} elements of {dtype}, counted in {COUNTED!r}"
            )
        return key.micro, None if is_totals else key.unit

    def check_open(self) -> None:
        """Raises what it was aborted with."""
        if self._error is not None:
            raise self._error

    def check_present(self, step: int) -> None:
        """StaleContribution for a step that is over."""
        if step < self._step:
            raise StaleContribution(
                f"step={step} is over, step {self._step} is the present one; give it up and go on "
                f"there"
            )

    # The owner's side

    def arrived(self, step: int) -> frozenset[int]:
        """The senders that are whole here: all micro-batches, all elements of all units."""
        with self.changed:
            found = ((k, sent) for k, sent in self._sent.items() if k[0] == step)
            return frozenset(sender for (_, sender), sent in found if not sent.left)

    def wait_arrived(self, step: int, *, enough: int, seconds: float | None) -> frozenset[int]:
        """The same once so many are, or the step is over, or so many seconds are."""
        self._clock.wait_for(
            lambda: (
                self._error is not None or step < self._step or len(self.arrived(step)) >= enough
            ),
            self.changed,
            seconds=seconds,
        )
        self.check_open()
        return self.arrived(step)

    def commit(
        self,
        step: int,
        senders: frozenset[int],
        into: Callable[[int, Span], Tensor] | None = None,
    ) -> Committed:
        """The sums over exactly these senders, with exactly their counts; the step is over.

        In the order of `schedule.order`, one micro-batch after another, so the bits are those of a
        reduce-scatter where all are in it. `into(unit, span)` is memory for a unit's sum. What
        others sent goes. MissingRanks, with nothing changed, where a sender is not whole.
        """
        with self.changed:
            self.check_open()
            self.check_present(step)
            if step > self._step:
                raise NotReady(f"step={step} comes after {self._step}, which is not committed yet")
            absent = sorted(senders - self.arrived(step))
            if absent or not senders:
                raise MissingRanks(
                    f"step {step} cannot be summed over ranks {sorted(senders)}: all parts of "
                    f"ranks {absent} did not come; nothing is filled in",
                    ranks=absent,
                )
            found = {sender: self._sent[step, sender] for sender in senders}
            loss_sum, lr = self._totalled(step, found)
            self._go_on(step + 1)
        owned = self._owned
        order = [k for k in schedule.order(owned.rank, owned.size) if k in senders]
        count = sum(sum(sent.counts.values()) for sent in found.values())
        units = {}
        for unit, span in owned.spans.items():
            total = torch.empty(len(span), dtype=owned.dtype) if into is None else into(unit, span)
            self._fold(total, span, unit, [found[k] for k in order])
            units[unit] = PartialSum(total, count, COUNTED)
        return Committed(units, loss_sum, count, lr)

    def _fold(self, total: Tensor, span: Span, unit: int, order: list[_Sent]) -> None:
        for micro in range(self._owned.micro_batches):
            sums = total if micro == 0 else torch.empty_like(total)
            for turn, sent in enumerate(order):
                for start, part in sent.parts[micro, unit].items():
                    place = sums[start - span.start : start - span.start + len(part.total)]
                    place.copy_(part.total) if turn == 0 else place.add_(part.total)
            if micro:
                total.add_(sums)

    def _totalled(self, step: int, found: Mapping[int, _Sent]) -> tuple[float, float]:
        """The losses, each sender's first, in one order at all owners; and the one rate."""
        loss_sum, rates = 0.0, set()
        for sender in (k for k in totals_order(self._owned.size) if k in found):
            of_sender = 0.0
            for micro in range(self._owned.micro_batches):
                loss, rate = found[sender].parts[micro, None][0].total.tolist()
                of_sender += loss
                rates.add(rate)
            loss_sum += of_sender
        if len(rates) > 1:
            raise ProtocolError(
                f"senders of step {step} say learning rates {sorted(rates)}; it is a function of "
                f"the step, so they must be the same"
            )
        return loss_sum, rates.pop()

    def clear(self, *, group_below: int | None = None, step_below: int | None = None) -> None:
        """Groups, or steps, below these are over: what they sent goes."""
        with self.changed:
            if group_below is not None and group_below > self._group:
                self._group = group_below
                self._sent.clear()
                self._later_bytes = 0
            if step_below is not None:
                self._go_on(step_below)
            self.changed.notify_all()

    def _go_on(self, step: int) -> None:
        self._step = max(self._step, step)
        for key in [key for key in self._sent if key[0] < self._step]:
            del self._sent[key]
        later = (sent for (number, _), sent in self._sent.items() if number > self._step)
        self._later_bytes = sum(sent.nbytes for sent in later)
        self.changed.notify_all()

    def abort(self, error: Exception) -> None:
        """Whoever waits here, or comes later, raises `error`; the first one stands."""
        with self.changed:
            self._error = self._error or error
            self._sent.clear()
            self._later_bytes = 0
            self.changed.notify_all()


def _check_same(known: PartialSum, part: PartialSum, label: Label) -> None:
    # Bytes, not values: a NaN is the same NaN when it comes again.
    is_same = torch.equal(known.total.view(torch.uint8), part.total.view(torch.uint8))
    if not is_same or known.count != part.count:
        raise Conflict(
            f"{label.key}: other values, or another count, of elements [{label.span.start}, "
            f"{label.span.stop}) came before from the same sender; a part is sent once"
        )


def _check_count(sent: _Sent, part: PartialSum, label: Label) -> None:
    counted = sent.counts.get(label.key.micro, part.count)
    if counted != part.count:
        raise Conflict(
            f"{label.key}: a part counts {part.count} {COUNTED}, others of its micro-batch count "
            f"{counted}; all parts of a micro-batch are over the same"
        )


def _told(place: _Place) -> str:
    micro, unit = place
    return f"micro-batch {micro}, " + ("totals" if unit is None else f"unit {unit}")
