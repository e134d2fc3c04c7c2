"""An owner in its server: who may ask what, versions that are never torn, and repeats."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives import memory, schedule
from atoll.collectives.base import Key, Label
from atoll.collectives.peers import READ_BYTES
from atoll.errors import (
    BlobMissing,
    Conflict,
    Diverged,
    Forbidden,
    GroupBroken,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleContribution,
    StaleGeneration,
    StoreError,
)
from atoll.models import registry
from atoll.strategies.sharded import accumulator
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.commit import Outcome
from atoll.strategies.sharded.quorum import messages, owner
from atoll.strategies.sharded.quorum.owner import Owner, Rule
from atoll.strategies.sharded.quorum.rank import Reception
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.units import Units

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = {"architecture": "gpt", "vocab": 600, "block": 4, "layers": 1, "heads": 1, "width": 512}
UNITS = Units.of_model(registry.layout(MODEL))
GROUP, RANK, SIZE, VERSION = 3, 1, 2, 6
STEP = VERSION + 1
PAIR = (0, 1)


def made(**options: Any) -> Owner:
    shard = Shard(UNITS, rank=RANK, size=SIZE)
    for unit in range(len(shard.owned)):
        shard.of(unit, "weights").fill_(1.0)
    return Owner(
        shard,
        group=GROUP,
        version=VERSION,
        trains=lambda _: True,
        micro_batches=1,
        rule=Rule(AdamW(weight_decay=0.0), clip=0.0),
        clock=SystemClock(),
        **options,
    )


def send(to: Owner, sender: int, *, step: int = STEP, value: float = 1.0) -> None:
    """Everything that a sender has for this owner, as the wire brings it."""
    for unit in UNITS.units:
        span = schedule.cut(unit.size, SIZE)[RANK]
        for piece in schedule.chunks(span, 1 << 18):
            label = Label(Key(GROUP, step, "reduce", 0, unit.number), 0, piece)
            body = memory.bytes_of(torch.full((len(piece),), value))
            to.answer(sender, messages.add_name(label, 5), body)
    said, part = accumulator.totals(GROUP, step, 0, loss_sum=2.0, lr=0.5, tokens=5)
    to.answer(sender, messages.add_name(said, 5), memory.bytes_of(part.total))


def fold(to: Owner, senders: tuple[int, ...] = PAIR, *, step: int = STEP, by: int = 0) -> Any:
    asked = messages.FoldRequest(group=GROUP, step=step, senders=senders)
    return messages.read(messages.FoldReply, to.answer(by, messages.FOLD, messages.written(asked)))


def updating(senders: tuple[int, ...] = PAIR, *, step: int = STEP) -> bytes:
    outcome = Outcome(step, frozenset(senders), frozenset(), 4.0, 10, 0.5, 3.0)
    return messages.written(messages.UpdateRequest.of(GROUP, outcome))


def commit(to: Owner, *, step: int = STEP) -> None:
    for sender in PAIR:
        send(to, sender, step=step)
    fold(to, step=step)
    to.answer(0, messages.UPDATE, updating(step=step))


def name(version: int, unit: int = 0, *, group: int = GROUP) -> str:
    return messages.parameters_name(group, version, unit, torch.float32)


def nbytes(of: Owner, unit: int = 0) -> int:
    return 4 * len(of.shard.owned[unit])


def test_owner_folds_and_steps_what_came():
    one = made()
    commit(one)

    assert one.present == STEP + 1
    # A constant gradient moves Adam by its rate in the first of its steps.
    first = 1.0 - 0.5 * (0.1 / (1 - 0.9**STEP)) / (0.05 / (1 - 0.95**STEP)) ** 0.5
    assert one.shard.of(0, "weights")[0].item() == pytest.approx(first, rel=1e-5)
    assert one.accumulator.nbytes == 0


def test_messages_that_come_again_change_nothing():
    one = made()
    for sender in PAIR:
        send(one, sender)
        send(one, sender)
    assert fold(one) == fold(one)
    one.answer(0, messages.UPDATE, updating())
    weights = one.shard.of(0, "weights").clone()

    one.answer(0, messages.UPDATE, updating())

    assert torch.equal(one.shard.of(0, "weights"), weights)
    with pytest.raises(StaleContribution):
        fold(one)
    with pytest.raises(StaleContribution):
        send(one, 0)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (lambda one: fold(one, by=1), Forbidden),
        (lambda one: one.answer(1, messages.UPDATE, updating()), Forbidden),
        (lambda one: one.answer(1, messages.OVER, b"{}"), Forbidden),
        (lambda one: send(one, 2), Forbidden),
        (lambda one: fold(one, (0,)), Conflict),
        (lambda one: one.answer(0, messages.UPDATE, updating((0,))), Conflict),
        (lambda one: fold(one, step=STEP + 1), NotReady),
        (lambda one: one.answer(0, messages.UPDATE, updating(step=STEP + 1)), NotReady),
        (lambda one: one.answer(0, messages.FOLD, b"\xff"), ProtocolError),
        (lambda one: one.answer(0, messages.FOLD, b'{"step": 7}'), ProtocolError),
        (lambda one: one.answer(0, "other", b""), ProtocolError),
        (lambda one: one.answer(0, "add/3/7/0/reduce/0/0/9", b"x"), ProtocolError),
        (lambda one: one.answer(0, "add/3/7/0/reduce/0/9/0/5", b""), ProtocolError),
        (lambda one: one.answer(0, f"add/3/7/0/reduce/0/0/{'9' * 40}/5", b""), ProtocolError),
        (lambda one: one.answer(0, "add/3/8/0/control/0/0/2/5", bytes(15)), ProtocolError),
        (
            lambda one: one.answer(0, "add/2/8/0/control/0/0/2/5", bytes(16)),
            StaleGeneration,
        ),
    ],
)
def test_refused_question_changes_nothing(asked, error):
    one = made()
    for sender in PAIR:
        send(one, sender)
    before = fold(one)

    with pytest.raises(error):
        asked(one)

    assert fold(one) == before
    assert one.present == STEP
    one.answer(0, messages.UPDATE, updating())
    assert one.present == STEP + 1


def test_set_with_somebody_who_is_not_whole_is_refused():
    one = made()
    send(one, 0)

    with pytest.raises(MissingRanks) as refused:
        fold(one)

    assert refused.value.ranks == (1,)
    fold(one, (0,))


def test_arrived_waits_until_all_are_whole():
    one = made()
    send(one, 0)
    asked = messages.ArrivedRequest(group=GROUP, step=STEP, seconds=20.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.arrived, asked)
        send(one, 1)

        assert waiting.result(10).senders == PAIR


@pytest.mark.parametrize(("start", "stop"), [(0, None), (5, READ_BYTES + 7), (3, 3), (1, 2)])
def test_read_gives_the_bytes_of_the_version(start, stop):
    one = made()
    values = one.shard.of(0, "weights")
    values.copy_(torch.arange(float(len(values))))
    stop = nbytes(one) if stop is None else stop
    assert nbytes(one) > READ_BYTES  # several pieces

    found = b"".join(one.read(name(VERSION), start, stop))

    assert found == bytes(memory.bytes_of(values))[start:stop]


def test_half_is_read_as_it_is_computed_with():
    one = made()
    one.shard.of(0, "weights").fill_(1.00390625)
    half = messages.parameters_name(GROUP, VERSION, 0, torch.bfloat16)

    found = b"".join(one.read(half, 0, 8))

    assert found == bytes(memory.bytes_of(torch.full((4,), 1.00390625).bfloat16()))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (name(VERSION - 1), StaleContribution),
        (name(VERSION, group=GROUP - 1), StaleGeneration),
        (name(VERSION, 9), BlobMissing),
        ("parameters/3/6/0", BlobMissing),
        ("parameters/3/6/0/int8", BlobMissing),
        ("parameters/3/-6/0/float32", ProtocolError),
    ],
)
def test_read_of_another_version_is_refused(asked, error):
    with pytest.raises(error):
        list(made().read(asked, 0, 4))


def test_read_beyond_the_end_is_refused():
    one = made()
    with pytest.raises(ProtocolError, match="which has"):
        list(one.read(name(VERSION), 0, nbytes(one) + 1))


def test_read_that_an_update_overtakes_is_refused_and_never_torn():
    """The window between two pieces."""
    one = made()
    pieces = one.read(name(VERSION), 0, nbytes(one))
    first = next(pieces)
    commit(one)

    assert set(first) == set(bytes(memory.bytes_of(torch.ones(1))))
    with pytest.raises(StaleContribution, match=f"step {STEP + 1} is the present one"):
        next(pieces)


def test_own_copy_of_a_version_that_is_over_is_refused():
    one = made()
    commit(one)

    with pytest.raises(StaleContribution):
        one.copy(0, VERSION, torch.empty(len(one.shard.owned[0])))


def test_read_of_the_next_version_waits_for_it():
    one = made()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: b"".join(one.read(name(STEP), 0, nbytes(one))))
        commit(one)

        assert reading.result(10) == bytes(memory.bytes_of(one.shard.of(0, "weights")))


def test_read_of_the_next_version_asks_to_call_again(monkeypatch):
    monkeypatch.setattr(owner, "VERSION_SECONDS", 0.01)

    with pytest.raises(NotReady):
        list(made().read(name(STEP), 0, 4))


def test_nothing_changes_while_a_step_is_told():
    """A save is written there: the next step waits for it, readers do not."""
    goes_on, begun = threading.Event(), threading.Event()
    seen: list[float] = []

    def told(_: Outcome) -> None:
        begun.set()
        goes_on.wait(10)
        seen.append(one.shard.of(0, "weights")[0].item())

    one = made(told=told)
    with ThreadPoolExecutor(2) as pool:
        committing = pool.submit(commit, one)
        begun.wait(10)
        now = one.shard.of(0, "weights")[0].item()
        following = pool.submit(commit, one, step=STEP + 1)
        assert len(b"".join(one.read(name(STEP), 0, 8))) == 8
        goes_on.set()
        committing.result(10)
        following.result(10)

    assert seen[0] == now
    assert seen[1] != now


def test_outcome_is_remembered_for_a_while_only():
    one = made()
    commit(one)

    told = one.outcome(STEP, seconds=1)

    assert told is not None and told.senders == frozenset(PAIR)
    assert one.outcome(STEP - 1, seconds=1) is None
    with pytest.raises(MissingRanks) as refused:
        one.outcome(STEP + 1, seconds=0.01)
    assert refused.value.ranks == (0,)


def test_floats_come_back_from_the_wire_with_their_bits():
    numbers = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for number in [*(numbers * 1e-17).exp().tolist(), 5e-324, 1.7e308, float("inf")]:
        reply = messages.FoldReply(squares=number, loss_sum=-number, tokens=1, lr=number / 3)
        assert messages.read(messages.FoldReply, messages.written(reply)) == reply
    nan = messages.FoldReply(squares=float("nan"), loss_sum=0.0, tokens=1, lr=0.1)
    back = messages.read(messages.FoldReply, messages.written(nan))
    assert back.squares != back.squares


def test_reception_asks_to_call_again_until_its_owner_is_there():
    reception = Reception()
    for call in (lambda: reception.answer(0, "x", b""), lambda: reception.read(name(6), 0, 4)):
        with pytest.raises(NotReady):
            call()

    one = made()
    reception.open(one)

    assert len(b"".join(reception.read(name(VERSION), 0, 4))) == 4


def test_training_learns_of_a_step_when_it_is_counted_and_saved():
    """Else the end of a round could be told without its last step."""
    goes_on, begun = threading.Event(), threading.Event()

    def told(_: Outcome) -> None:
        begun.set()
        goes_on.wait(10)

    one = made(told=told)
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit, one)
        begun.wait(10)
        with pytest.raises(MissingRanks):
            one.outcome(STEP, seconds=0.01)
        with pytest.raises(NotReady):
            one.reach(0, STEP)
        goes_on.set()
        committing.result(10)

    assert one.outcome(STEP, seconds=0) is not None


def test_step_that_cannot_be_saved_yet_is_not_folded():
    allowed: list[int] = []
    one = made(may_fold=lambda step: step in allowed)
    for sender in PAIR:
        send(one, sender)

    with pytest.raises(NotReady, match="rank 1 still writes what it saved before step 7"):
        fold(one)
    allowed.append(STEP)
    found = fold(one)
    allowed.clear()

    assert fold(one) == found  # it is done: asked again, nothing is to be written


def test_end_of_a_round_is_reached_when_all_have_said_so():
    one = made()
    with pytest.raises(NotReady):
        one.answer(0, messages.reached_name(GROUP, STEP), b"")
    commit(one)

    one.answer(0, messages.reached_name(GROUP, STEP), b"")
    one.answer(0, messages.reached_name(GROUP, STEP), b"")
    with pytest.raises(MissingRanks) as refused:
        one.wait_met(STEP, seconds=0.01)
    one.reach(RANK, STEP)
    one.wait_met(STEP, seconds=0)
    commit(one, step=STEP + 1)

    assert refused.value.ranks == (RANK,)
    one.answer(0, messages.reached_name(GROUP, STEP), b"")  # late words of what is over
    one.wait_met(STEP, seconds=0)
    with pytest.raises(MissingRanks):
        one.wait_met(STEP + 1, seconds=0.01)
    with pytest.raises(StaleGeneration):
        one.answer(0, messages.reached_name(GROUP - 1, STEP + 1), b"")
    with pytest.raises(ProtocolError):
        one.answer(0, "reached/3", b"")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreError("the disk of this rank is full"), GroupBroken),
        (StaleGeneration("group 3 is over"), StaleGeneration),
        (Diverged("no number"), Diverged),
        (MissingRanks("rank 0 is", ranks=[0]), MissingRanks),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_what_is_one_ranks_own_matter_is_not_the_others(error, told):
    one = made()
    one.abort(error)

    with pytest.raises(type(error)):
        one.outcome(STEP, seconds=0)
    for asks in (
        lambda: send(one, 0),
        lambda: fold(one),
        lambda: list(one.read(name(VERSION), 0, 8)),
    ):
        with pytest.raises(told):
            asks()
