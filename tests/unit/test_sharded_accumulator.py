"""What waits at an owner until a step is committed: known by its key, bounded, never filled in."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives.base import Key, Label
from atoll.errors import (
    AtollError,
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
from atoll.simulate.fibers import Scheduler
from atoll.strategies.sharded.accumulator import Accumulator, Owned, totals
from atoll.sums.partial import PartialSum

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP, SIZE, RANK, MICROS = 4, 3, 1, 2
SPANS = {0: Span(5, 12), 2: Span(40, 43)}
OWNED = Owned(RANK, SIZE, SPANS, MICROS)
TOKENS = {0: (8, 3), 1: (5, 0), 2: (7, 2)}  # of each sender's micro-batches
RATE = 0.1
ALL = frozenset(range(SIZE))
Part = tuple[Label, int, PartialSum]


def made(**changes: Any) -> Accumulator:
    options = {"limit_bytes": OWNED.step_bytes, "group": GROUP, "owned": OWNED}
    return Accumulator(ALL, **{**options, "clock": SystemClock(), "wait_seconds": 0.01, **changes})


def values(sender: int, micro: int, unit: int, step: int = 1) -> Tensor:
    """Of very different sizes, so that another order of adding shows."""
    seed = ((step * 10 + sender) * 10 + micro) * 10 + unit
    found = torch.randn(len(SPANS[unit]), generator=torch.Generator().manual_seed(seed))
    return found * 10.0 ** (sender * 3 - micro)


def label(micro: int, unit: int, span: Span, *, step: int = 1, group: int = GROUP) -> Label:
    return Label(Key(group, step, "reduce", micro, unit), 0, span)


def loss(sender: int, micro: int) -> float:
    return 0.1 + sender + micro * 1e-9


def parts(sender: int, *, step: int = 1, cuts: int = 3) -> list[Part]:
    """All that one sender sends of a step, in pieces of `cuts` elements."""
    found: list[Part] = []
    for micro in range(MICROS):
        count = TOKENS[sender][micro]
        for unit, span in SPANS.items():
            whole = values(sender, micro, unit, step)
            for start in range(span.start, span.stop, cuts):
                piece = Span(start, min(start + cuts, span.stop))
                cut = whole[piece.start - span.start : piece.stop - span.start]
                said = label(micro, unit, piece, step=step)
                found.append((said, sender, PartialSum(cut, count, "tokens")))
        said, end = totals(GROUP, step, micro, loss_sum=loss(sender, micro), lr=RATE, tokens=count)
        found.append((said, sender, end))
    return found


def send(accumulator: Accumulator, *senders: int, step: int = 1) -> None:
    for sender in senders:
        for part in parts(sender, step=step):
            assert accumulator.add(*part) == "taken"


def summed(unit: int, order: tuple[int, ...], step: int = 1) -> Tensor:
    """By plain additions: a micro-batch's senders one after another, then the micro-batches."""
    micros = []
    for micro in range(MICROS):
        total = values(order[0], micro, unit, step)
        for sender in order[1:]:
            total = total + values(sender, micro, unit, step)
        micros.append(total)
    return micros[0] + micros[1]


@pytest.mark.parametrize(
    ("senders", "order"),
    [(ALL, (2, 0, 1)), ({0, 2}, (2, 0)), ({0, 1}, (0, 1)), ({1}, (1,))],
    ids=str,
)
def test_commit_sums_exactly_these_senders_in_the_canonical_order(senders, order):
    accumulator = made()
    send(accumulator, 0, 1, 2)

    found = accumulator.commit(1, frozenset(senders))

    count = sum(sum(TOKENS[sender]) for sender in senders)
    for unit in SPANS:
        assert torch.equal(found.units[unit].total, summed(unit, order))
        assert found.units[unit].count == count
    losses = sum(loss(s, m) for s in senders for m in range(MICROS))
    assert found.loss_sum == pytest.approx(losses, rel=1e-15)
    assert (found.tokens, found.lr) == (count, RATE)


def test_another_order_gives_other_bits():
    """The control of the one above."""
    orders = [summed(0, order) for order in permutations(range(SIZE))]

    assert any(not torch.equal(orders[0], other) for other in orders[1:])


def test_parts_may_come_in_any_order_and_pieces():
    straight, mixed = made(), made()
    send(straight, 0, 1, 2)
    every = [part for sender in ALL for part in parts(sender, cuts=2 + sender)]
    for part in every[::-1]:
        mixed.add(*part)

    a, b = straight.commit(1, ALL), mixed.commit(1, ALL)

    assert all(torch.equal(a.units[unit].total, b.units[unit].total) for unit in SPANS)
    assert a.loss_sum == b.loss_sum


def test_sender_is_whole_with_its_last_part_only():
    for missing in range(len(parts(0))):
        accumulator = made()
        *rest, last = [p for k, p in enumerate(parts(0)) if k != missing] + [parts(0)[missing]]
        for part in rest:
            accumulator.add(*part)
        assert accumulator.arrived(1) == frozenset()

        accumulator.add(*last)

        assert accumulator.arrived(1) == {0}


def test_same_part_again_changes_nothing():
    accumulator = made()
    send(accumulator, 0, 1)
    held = accumulator.nbytes

    repeats = [accumulator.add(*part) for part in parts(0)]

    assert set(repeats) == {"repeated"}
    assert accumulator.nbytes == held
    assert torch.equal(accumulator.commit(1, frozenset({0, 1})).units[0].total, summed(0, (0, 1)))


def test_not_a_number_is_repeated_too():
    accumulator = made()
    said, sender, part = parts(0)[0]
    broken = PartialSum(torch.full_like(part.total, torch.nan), part.count, part.unit)
    accumulator.add(said, sender, broken)

    assert accumulator.add(said, sender, broken) == "repeated"


def test_part_is_a_copy():
    accumulator = made()
    every = parts(0)
    for part in every:
        accumulator.add(*part)
        part[2].total.zero_()

    assert torch.equal(accumulator.commit(1, frozenset({0})).units[0].total, summed(0, (0,)))


FIRST = Span(5, 8)


def changed(**changes: Any) -> Callable[[Part], Part]:
    """The first part of a sender, with something else about it."""

    def change(part: Part) -> Part:
        said, sender, values = part
        group, step = changes.get("group", GROUP), changes.get("step", 1)
        micro, unit = changes.get("micro", 0), changes.get("unit", 0)
        span = changes.get("span", said.span)
        total = changes.get("total", values.total)
        count = changes.get("count", values.count)
        return (
            label(micro, unit, span, step=step, group=group),
            changes.get("sender", sender),
            PartialSum(total, count, changes.get("counted", "tokens")),
        )

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (changed(group=GROUP - 1), StaleGeneration),
        (changed(group=GROUP + 1), StaleGeneration),
        (changed(step=0), StaleContribution),
        (changed(sender=3), Forbidden),
        (changed(sender=-1), Forbidden),
        (changed(micro=2), ProtocolError),
        (changed(unit=1), ProtocolError),
        (changed(span=Span(4, 7)), ProtocolError),
        (changed(span=Span(10, 13)), ProtocolError),
        (changed(span=Span(6, 6), total=torch.zeros(0)), ProtocolError),
        (changed(total=torch.zeros(4)), ProtocolError),
        (changed(total=torch.zeros(3, dtype=torch.float64)), ProtocolError),
        (changed(counted="rows"), ProtocolError),
        (changed(total=torch.zeros(3)), Conflict),
        (changed(count=9), Conflict),
        (changed(span=Span(6, 9)), Conflict),
        (changed(span=Span(5, 7), total=torch.zeros(2)), Conflict),
        (changed(span=Span(8, 11), count=9), Conflict),
        (changed(step=2), NotReady),
    ],
)
def test_refused_part_changes_nothing(change, error):
    accumulator = made()
    first, *rest = parts(0)
    accumulator.add(*first)
    held = accumulator.nbytes

    with pytest.raises(error):
        accumulator.add(*change(first))

    assert accumulator.nbytes == held
    for part in rest:
        assert accumulator.add(*part) == "taken"
    found = accumulator.commit(1, frozenset({0}))
    assert torch.equal(found.units[0].total, summed(0, (0,)))
    assert found.tokens == sum(TOKENS[0])


def test_missing_sender_is_named_and_nothing_is_filled_in():
    accumulator = made()
    send(accumulator, 0)
    for part in parts(2)[:-1]:
        accumulator.add(*part)
    held = accumulator.nbytes

    with pytest.raises(MissingRanks, match="nothing is filled in") as refused:
        accumulator.commit(1, ALL)

    assert refused.value.ranks == (1, 2)
    assert accumulator.nbytes == held
    accumulator.add(*parts(2)[-1])
    found = accumulator.commit(1, frozenset({0, 2}))
    assert torch.equal(found.units[0].total, summed(0, (2, 0)))
    assert found.tokens == sum(TOKENS[0]) + sum(TOKENS[2])


def test_senders_with_two_learning_rates_are_refused_and_nothing_changes():
    accumulator = made()
    send(accumulator, 0)
    for said, sender, part in parts(1):
        total = part.total * 2 if said.key.op == "control" else part.total
        accumulator.add(said, sender, PartialSum(total, part.count, part.unit))

    with pytest.raises(ProtocolError, match="learning rates"):
        accumulator.commit(1, frozenset({0, 1}))

    assert accumulator.commit(1, frozenset({0})).lr == RATE


def test_sum_over_nobody_is_refused():
    accumulator = made()
    send(accumulator, 0)

    with pytest.raises(MissingRanks):
        accumulator.commit(1, frozenset())

    assert accumulator.arrived(1) == {0}


def test_late_parts_of_a_committed_step_change_nothing():
    accumulator = made()
    send(accumulator, 0, 1)
    accumulator.commit(1, frozenset({0, 1}))

    for part in parts(2):
        with pytest.raises(StaleContribution, match="step 2 is the present one"):
            accumulator.add(*part)
    with pytest.raises(StaleContribution):
        accumulator.commit(1, frozenset({0}))

    assert accumulator.nbytes == 0
    send(accumulator, 0, 1, 2, step=2)
    assert torch.equal(accumulator.commit(2, ALL).units[2].total, summed(2, (2, 0, 1), step=2))


def test_nothing_is_left_after_a_thousand_steps():
    accumulator = made()
    most = 0
    for step in range(1, 1001):
        for part in parts(step % SIZE, step=step, cuts=7):
            accumulator.add(*part)
        accumulator.add(*parts((step + 1) % SIZE, step=step)[0])  # one that is never whole
        most = max(most, accumulator.nbytes)
        accumulator.commit(step, frozenset({step % SIZE}))

    assert accumulator.nbytes == 0
    assert most <= OWNED.step_bytes


def test_limit_below_a_step_is_refused():
    with pytest.raises(ConfigError, match=f"limit_bytes={OWNED.step_bytes - 1}"):
        made(limit_bytes=OWNED.step_bytes - 1)


def test_later_step_has_only_what_the_limit_leaves():
    accumulator = made(limit_bytes=OWNED.step_bytes + 12)
    ahead = parts(0, step=2)

    assert accumulator.add(*ahead[0]) == "taken"  # three elements
    with pytest.raises(NotReady, match="step=2 is still to come"):
        accumulator.add(*ahead[1])

    send(accumulator, 0, 1, 2)  # the present one has all it needs
    assert accumulator.nbytes <= OWNED.step_bytes + 12
    accumulator.commit(1, ALL)
    assert accumulator.add(*ahead[0]) == "repeated"
    assert accumulator.add(*ahead[1]) == "taken"


def test_part_without_room_waits_until_there_is_some():
    accumulator = made(wait_seconds=20.0)
    send(accumulator, 0)
    began = threading.Event()

    def push() -> str:
        began.set()
        return accumulator.add(*parts(1, step=2)[0])

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        began.wait(10)
        accumulator.commit(1, frozenset({0}))

        assert pushing.result(10) == "taken"


def test_part_without_room_waits_by_the_clock_of_fibers():
    scheduler, told = Scheduler(), []
    accumulator = made(clock=scheduler, wait_seconds=30.0)

    def push() -> None:
        told.append((accumulator.add(*parts(1, step=2)[0]), scheduler.now()))

    def commit() -> None:
        send(accumulator, 0)
        scheduler.sleep(12.0)
        accumulator.commit(1, frozenset({0}))

    scheduler.spawn("push", push)
    scheduler.spawn("commit", commit)
    scheduler.run_until(lambda: bool(told), limit_seconds=100)

    assert told == [("taken", 12.0)]


def test_another_group_clears_what_the_last_one_sent():
    accumulator = made()
    send(accumulator, 0)

    accumulator.clear(group_below=GROUP + 1)

    assert accumulator.nbytes == 0
    with pytest.raises(StaleGeneration) as refused:
        accumulator.add(*parts(0)[0])
    assert refused.value.present == GROUP + 1


def test_clear_ends_steps():
    accumulator = made()
    send(accumulator, 0)

    accumulator.clear(step_below=5)

    assert (accumulator.nbytes, accumulator.step) == (0, 5)
    with pytest.raises(StaleContribution):
        accumulator.add(*parts(0)[0])


def test_abort_reaches_who_waits_and_who_comes():
    accumulator = made()
    send(accumulator, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(accumulator.wait_arrived, 1, enough=2, seconds=20.0)
        accumulator.abort(StaleGeneration("group 4 is over"))
        with pytest.raises(StaleGeneration, match="group 4 is over"):
            waiting.result(10)

    for call in (lambda: accumulator.add(*parts(1)[0]), lambda: accumulator.commit(1, ALL)):
        with pytest.raises(StaleGeneration, match="group 4 is over"):
            call()
    assert accumulator.nbytes == 0


def test_many_threads_send_at_once():
    accumulator = made()
    every = [part for sender in ALL for part in parts(sender)] * 2

    def push(part: Part) -> str:
        return accumulator.add(*part)

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(push, every))

    assert sorted(told) == ["repeated"] * (len(every) // 2) + ["taken"] * (len(every) // 2)
    assert torch.equal(accumulator.commit(1, ALL).units[0].total, summed(0, (2, 0, 1)))


def test_owner_of_nothing_knows_who_is_whole_and_what_they_count():
    nothing = Owned(RANK, SIZE, {}, MICROS)
    accumulator = made(owned=nothing, limit_bytes=nothing.step_bytes)
    for said, sender, part in [*parts(0), *parts(1)]:
        if said.key.op == "control":
            accumulator.add(said, sender, part)

    found = accumulator.commit(1, accumulator.arrived(1))

    assert found.units == {}
    assert found.tokens == sum(TOKENS[0]) + sum(TOKENS[1])


# Controls: mutants that the tests above must catch


class FillsIn(Accumulator):
    """Whoever is missing counts in full, with zeros."""

    def commit(self, step: int, senders: frozenset[int], into: Any = None) -> Any:
        for sender in senders - self.arrived(step):
            for said, _, part in parts(sender, step=step):
                try:
                    zeros = part.total * (said.key.op == "control")
                    self.add(said, sender, PartialSum(zeros, part.count, part.unit))
                except AtollError:
                    continue
        return super().commit(step, senders, into)


class Appends(Accumulator):
    """A repeat is a part of its own."""

    def add(self, label: Label, sender: int, part: PartialSum) -> Any:
        found = super().add(label, sender, part)
        if found == "repeated" and label.key.op == "reduce":
            self._sent[label.key.step, sender].parts[label.key.micro, label.key.unit][
                label.span.start
            ].total.add_(part.total)
        return found


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (FillsIn, test_missing_sender_is_named_and_nothing_is_filled_in),
        (Appends, test_same_part_again_changes_nothing),
    ],
)
def test_mutant_is_caught(monkeypatch, mutant, test):
    monkeypatch.setitem(globals(), "Accumulator", mutant)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
