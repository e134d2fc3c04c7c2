"""Steps that are committed by quorum: late ranks block nobody and leave both sum and count."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from atoll.collectives.peers import Peers
from atoll.errors import (
    AtollError,
    Diverged,
    GroupBroken,
    MissingRanks,
    StaleContribution,
    StaleGeneration,
)
from atoll.models import gpt
from atoll.strategies.sharded.accumulator import Accumulator, Committed
from atoll.strategies.sharded.commit import Policy
from atoll.strategies.sharded.quorum import messages, owner
from atoll.strategies.sharded.quorum.owner import Owner
from atoll.strategies.sharded.quorum.rank import Reception
from atoll.strategies.sharded.shard import Section
from atoll.sums.partial import PartialSum
from tests import quorums, sharded
from tests.quorums import DEADLINE, Member, Pause
from tests.sharded import Training

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, LATE, STEP = 3, 2, 2
ALL = frozenset(range(SIZE))
SECTIONS: tuple[Section, ...] = ("weights", "first_moments", "second_moments")
# 7 rows over 3 ranks in 2 micro-batches: 2, 2 and 3 rows, so a set that is wrong shows.
FP32 = Training(steps=4)
FP64 = Training(steps=4, dtype=torch.float64)
BOUND = 1e-12  # float64, as of ranks that all take part

TRANSPORTS: dict[str, Callable[..., list[Any]]] = {
    "fibers": quorums.in_fibers,
    "threads": quorums.in_threads,
    "grpc": quorums.over_grpc,
    "grpc, TLS": partial(quorums.over_grpc, is_tls=True),
}
every_transport = pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)


def flat(training: Training, members: list[Member], section: Any = "weights") -> torch.Tensor:
    return sharded.whole(training, [m.rank.owner.shard for m in members], section)


def away(members: list[Member], sets: dict[int, frozenset[int]]) -> float:
    """From one process over the rows of these sets."""
    wanted = quorums.alone(FP64, sets, SIZE)
    return max(sharded.differences(FP64, flat(FP64, members), wanted))


def sets_of(member: Member) -> dict[int, frozenset[int]]:
    return {outcome.step: outcome.senders for outcome in member.heard}


def sleeps(seconds: float, *, rank: int = LATE, step: int = STEP) -> Pause:
    """Late compute, on a virtual clock."""

    def pause(member: Member, at: int) -> None:
        if member.peers.rank == rank and at == step:
            member.clock.sleep(seconds)

    return pause


# All there


@every_transport
@pytest.mark.parametrize("kind", ["strict", "quorum"])
def test_with_all_there_the_bits_are_those_of_the_ring(transport, kind):
    ring = sharded.threads(SIZE, sharded.trained(FP32))

    members = transport(SIZE, FP32, quorums.trained(FP32), kind=kind)

    for section in SECTIONS:
        wanted = sharded.whole(FP32, [rank.shard for rank in ring], section)
        assert torch.equal(flat(FP32, members, section), wanted)
    for member in members:
        told = [(m.step, m.loss_sum, m.tokens, m.norm) for m in member.made]
        assert told == [(m.step, m.loss_sum, m.tokens, m.norm) for m in ring[0].made]
        assert {outcome.excluded for outcome in member.heard} == {frozenset()}


def test_ranks_without_rows_take_part():
    few = Training(batch=2, steps=2, dtype=torch.float64)

    members = quorums.in_fibers(4, few, quorums.trained(few))

    every = dict.fromkeys((1, 2), frozenset(range(4)))
    found = sharded.differences(few, flat(few, members), quorums.alone(few, every, 4))
    assert max(found) < BOUND


def test_all_there_do_not_wait_for_the_deadline():
    [end, *_] = quorums.in_fibers(
        SIZE, FP32, lambda m: (quorums.trained(FP32)(m), m.clock.now())[1]
    )

    assert end == 0.0


def test_evaluation_is_that_of_collectives():
    def held_out(steps: Any, peers: Peers) -> tuple[float, int]:
        batches = [(rows, True) for rows, _ in sharded.own(FP64, 9, peers)]
        return steps.evaluate(FP64.steps, batches, gpt.loss_sum)  # type: ignore[no-any-return]

    def by_collectives(ranks: Any, clock: Any) -> tuple[float, int]:
        steps = sharded.opened(FP64, ranks, clock)
        for step in range(1, FP64.steps + 1):
            steps.train(step, sharded.own(FP64, step, ranks), gpt.loss, lr=FP64.rate(step))
        return held_out(steps, ranks)

    wanted = sharded.threads(SIZE, by_collectives)

    found = quorums.in_fibers(
        SIZE, FP64, lambda m: held_out(quorums.trained(FP64)(m).rank.steps, m.peers)
    )

    assert found == wanted


# A late rank


@pytest.mark.parametrize("late", range(SIZE))
@pytest.mark.parametrize("steps_late", [1, 2])
def test_late_rank_leaves_sum_and_count_and_blocks_nobody(late, steps_late):
    """The first rank's training may be late, too: its server leads and steps all the same."""
    seconds = steps_late * DEADLINE + 1
    ends: dict[int, float] = {}

    def work(member: Member) -> Member:
        quorums.trained(FP64, sleeps(seconds, rank=late))(member)
        ends[member.peers.rank] = member.clock.now()
        return member

    members = quorums.in_fibers(SIZE, FP64, work)

    in_time = ALL - {late}
    without = range(STEP, STEP + steps_late)
    sets = {s: in_time if s in without else ALL for s in range(1, FP64.steps + 1)}
    assert [sets_of(member) for member in members] == [sets] * SIZE
    assert away(members, sets) < BOUND
    assert away(members, dict.fromkeys(sets, ALL)) > 1e-6  # the control
    # It gives up the step that it computed, and goes on with the one that is present then.
    assert members[late].abandoned == [STEP]
    expected = [s for s in range(1, FP64.steps + 1) if s not in without]
    assert [made.step for made in members[late].made] == expected
    # Who is in time waits the deadline and no longer; in the end all wait for the late one.
    assert all(ends[rank] <= seconds + 1e-6 for rank in in_time)
    for rank in in_time:
        assert [made.step for made in members[rank].made] == [1, 2, 3, 4]
        assert members[rank].abandoned == []
    for member in members:
        excluded = {o.step: o.excluded for o in member.heard if o.excluded}
        assert excluded == dict.fromkeys(without, frozenset({late}))


def test_tokens_and_losses_are_those_of_the_set():
    members = quorums.in_fibers(
        SIZE, FP64, quorums.trained(FP64, sleeps(DEADLINE + 1)), kind="quorum"
    )

    assert [made.tokens for made in members[0].made] == [56, 32, 56, 56]  # 4 of 7 rows of 8
    assert members[0].made == members[1].made


@pytest.mark.parametrize(
    "transport", [quorums.in_threads, quorums.over_grpc], ids=["threads", "grpc"]
)
def test_late_rank_blocks_nobody_in_real_time(transport):
    """The others finish all of their steps while it computes one."""
    others_done = threading.Barrier(SIZE, timeout=60)
    paused: list[int] = []  # in which step

    def pause(member: Member, at: int) -> None:
        # From the second on: a busy machine may have left it out of that one.
        if member.peers.rank == LATE and at >= STEP and not paused:
            paused.append(at)
            others_done.wait()

    def work(member: Member) -> Member:
        quorums.trained(FP64, pause)(member)
        if member.peers.rank != LATE:
            others_done.wait()
        return member

    members = transport(SIZE, FP64, work, deadline_seconds=0.5)

    sets = sets_of(members[0])
    assert [sets_of(member) for member in members] == [sets] * SIZE
    assert not any(LATE in sets[step] for step in range(paused[0], FP64.steps + 1))
    assert members[LATE].abandoned[-1] == paused[0]
    assert away(members, sets) < BOUND  # its server has stepped its shard


@pytest.mark.parametrize(
    ("kind", "min_workers", "sleepers"),
    [("strict", 1, {2}), ("quorum", 3, {2}), ("quorum", 2, {0, 1})],
)
def test_too_few_are_missing_by_name_and_no_weight_changes(kind, min_workers, sleepers):
    def pause(member: Member, at: int) -> None:
        if member.peers.rank in sleepers and at == STEP:
            member.clock.sleep(3 * DEADLINE)

    def work(member: Member) -> tuple[Member, MissingRanks, float]:
        with pytest.raises(MissingRanks) as refused:
            quorums.trained(FP64, pause)(member)
        return member, refused.value, member.clock.now()

    found = quorums.in_fibers(SIZE, FP64, work, kind=kind, min_workers=min_workers)

    assert {error.ranks for _, error, _ in found} == {tuple(sorted(sleepers))}
    ends = {now for member, _, now in found if member.peers.rank not in sleepers}
    assert max(ends) <= DEADLINE + 1e-6
    one_step = Training(steps=1, dtype=torch.float64)
    wanted = quorums.alone(one_step, {1: ALL}, SIZE)
    members = [member for member, _, _ in found]
    assert max(sharded.differences(FP64, flat(FP64, members), wanted)) < BOUND


# Owners with different arrivals


class Slow:
    """Peers of a rank whose last words to one owner are under way for long, at one step."""

    def __init__(self, inner: Peers, clock: Any, *, to: int, seconds: float) -> None:
        self._inner = inner
        self._clock = clock
        self._to = to
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(self, rank: int, name: str, body: Any = b"") -> bytes:
        if rank == self._to and name.startswith(f"add/1/{STEP}/0/control"):
            self._clock.sleep(self._seconds)
        return self._inner.ask(rank, name, body)


def with_slow_way(training: Training) -> Callable[[Member], Any]:
    """From rank 2 to owner 1: whole at owners 0 and 2 alone."""

    def work(member: Member) -> Any:
        exchange: Any = member.rank.engine.collectives
        if member.peers.rank == LATE:
            slow = Slow(member.peers, member.clock, to=1, seconds=DEADLINE + 1)
            exchange._peers = slow  # noqa: SLF001
        return quorums.trained(training)(member)

    return work


def test_set_is_who_is_whole_at_every_owner_for_all_spans():
    members = quorums.in_fibers(SIZE, FP64, with_slow_way(FP64))

    sets = {1: ALL, 2: frozenset({0, 1}), 3: ALL, 4: ALL}
    assert [sets_of(member) for member in members] == [sets] * SIZE
    assert away(members, sets) < BOUND
    assert members[LATE].abandoned == [STEP]


class OwnSets(Owner):
    """Each owner takes what it got."""

    def fold(self, asked: messages.FoldRequest) -> messages.FoldReply:
        mine = tuple(sorted(self.accumulator.arrived(asked.step)))
        return super().fold(asked.model_copy(update={"senders": mine or asked.senders}))

    def update(self, asked: messages.UpdateRequest) -> messages.Done:
        folded = self._progress._fold  # noqa: SLF001
        senders = asked.senders if folded is None else tuple(sorted(folded[0]))
        return super().update(asked.model_copy(update={"senders": senders}))


def test_owners_with_sets_of_their_own_do_not_pass(monkeypatch):
    """Mutant: the leader sees that owners count differently, and no weight changes."""
    monkeypatch.setattr("atoll.strategies.sharded.quorum.rank.Owner", OwnSets)

    with pytest.raises(AtollError, match="told them different things"):
        quorums.in_fibers(SIZE, FP64, with_slow_way(FP64))


class FillsIn(Accumulator):
    """Who is missing is zero, and counts in full."""

    def commit(self, step: int, senders: frozenset[int], into: Any = None) -> Committed:
        made = super().commit(step, senders, into)
        tokens = FP64.batch * FP64.tokens
        units = {k: PartialSum(s.total, tokens, s.unit) for k, s in made.units.items()}
        return Committed(units, made.loss_sum, tokens, made.lr)


def test_zeros_with_full_count_do_not_pass(monkeypatch):
    """Mutant of what is compared with one process."""
    monkeypatch.setattr(owner, "Accumulator", FillsIn)
    # Adam takes most of a wrong scale out again; clipping and eps show it.
    members = quorums.in_fibers(SIZE, FP64, quorums.trained(FP64, sleeps(DEADLINE + 1)))

    assert away(members, sets_of(members[0])) > 1e3 * BOUND


# Repeats, losses, deaths


class Repeating:
    """A desk that hears everything twice, the second time after the next thing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._last: tuple[int, str, bytes] | None = None
        self.refused: list[AtollError] = []

    def answer(self, sender: int, name: str, body: Any) -> bytes:
        again, self._last = self._last, (sender, name, bytes(body))
        found = self._inner.answer(sender, name, body)
        for said in (again, self._last):
            if said is not None and said[1] != messages.OVER:
                self._repeat(*said)
        return bytes(found)

    def _repeat(self, sender: int, name: str, body: bytes) -> None:
        try:
            self._inner.answer(sender, name, body)
        except StaleContribution as error:
            self.refused.append(error)


def test_repeated_and_reordered_messages_change_nothing(monkeypatch):
    made: list[Repeating] = []
    answer = Reception.answer

    def repeated(self: Any, sender: int, name: str, body: Any) -> bytes:
        desk = next((one for one in made if one._inner is self._owner), None)  # noqa: SLF001
        if desk is None:
            if self._owner is None:
                return answer(self, sender, name, body)
            desk = Repeating(self._owner)
            made.append(desk)
        return desk.answer(sender, name, body)

    ring = sharded.threads(SIZE, sharded.trained(FP32))
    monkeypatch.setattr(Reception, "answer", repeated)

    members = quorums.in_fibers(SIZE, FP32, quorums.trained(FP32))

    assert torch.equal(flat(FP32, members), sharded.whole(FP32, [r.shard for r in ring]))
    assert len(made) == SIZE and any(desk.refused for desk in made)


def test_rank_in_the_set_whose_answer_was_lost_is_not_taken_for_late():
    """Its last words are said again when the step is over, and refused as late."""

    class Forgetful(Slow):
        def ask(self, rank: int, name: str, body: Any = b"") -> bytes:
            found = self._inner.ask(rank, name, body)
            if rank == self._to and name.startswith(f"add/1/{STEP}/1/control"):
                self._clock.sleep(1.0)  # the step is committed meanwhile
                return self._inner.ask(rank, name, body)
            return found

    def work(member: Member) -> Any:
        exchange: Any = member.rank.engine.collectives
        if member.peers.rank == 1:
            exchange._peers = Forgetful(member.peers, member.clock, to=2, seconds=0)  # noqa: SLF001
        return quorums.trained(FP64)(member)

    members = quorums.in_fibers(SIZE, FP64, work)

    assert members[1].abandoned == []
    assert [made.step for made in members[1].made] == [1, 2, 3, 4]
    assert set(sets_of(members[0]).values()) == {ALL}


def test_leader_that_dies_is_missed_by_name():
    def work(member: Member) -> tuple[int, ...]:
        with pytest.raises(MissingRanks) as refused:
            quorums.trained(FP64)(member)
        assert member.rank.owner.present == 1
        return refused.value.ranks

    def spawn(_: str, __: Callable[[], None]) -> None:
        """Dead before it begins."""

    opened = quorums.opened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quorums, "opened", lambda *a, **k: opened(*a, **{**k, "spawn": spawn}))
        found = quorums.in_fibers(SIZE, FP64, work)

    assert found == [(0,)] * SIZE


def test_owner_that_dies_is_missed_by_name():
    """While the step is collected: its desk is gone, and nobody's weights change."""

    def work(member: Member) -> Any:
        def pause(one: Member, at: int) -> None:
            if one.peers.rank == LATE and at == STEP:
                one.peers.close()

        with pytest.raises(AtollError) as refused:
            quorums.trained(FP64, pause)(member)
        return member.peers.rank, refused.value, member.rank.owner.present

    found = quorums.in_fibers(SIZE, FP64, work)

    for rank, error, present in found[:LATE]:
        assert isinstance(error, MissingRanks), (rank, error)
        assert error.ranks == (LATE,)
        assert present == STEP


@pytest.mark.parametrize("dead", [0, LATE])
def test_rank_that_is_gone_between_servers_ends_the_step_for_all(dead):
    """The leader too: missed by name, or told by the very stream that it leaves in; in time, and
    no weight of the others has changed since the last step.
    """

    def pause(member: Member, at: int) -> None:
        if member.peers.rank == dead and at == STEP:
            member.rank.abort(GroupBroken("dead"))
            member.peers.close()

    def work(member: Member) -> tuple[AtollError, int]:
        with pytest.raises(AtollError) as refused:
            quorums.trained(FP64, pause)(member)
        return refused.value, member.rank.owner.present

    found = quorums.over_grpc(SIZE, FP64, work, deadline_seconds=1.0, timeout_seconds=1.0)

    del found[dead]
    for error, present in found:
        assert isinstance(error, (MissingRanks, StaleGeneration, GroupBroken)), error
        assert getattr(error, "ranks", (dead,)) == (dead,)
        assert present == STEP


def test_abort_reaches_everybody_who_waits():
    """Pushed by whoever learns that the group is over; not at the deadline."""
    ended = StaleGeneration("group 1 is over", present=2)

    def pause(member: Member, at: int) -> None:
        if member.peers.rank == LATE and at == STEP:
            member.clock.sleep(1.0)
            for one in ranks:
                one.rank.abort(ended)

    ranks: list[Member] = []

    def work(member: Member) -> float:
        ranks.append(member)
        with pytest.raises(StaleGeneration, match="group 1 is over"):
            quorums.trained(FP64, pause)(member)
        member.rank.steps.abandon()
        assert member.rank.engine.nbytes == 0
        assert member.rank.owner.accumulator.nbytes == 0
        return member.clock.now()

    assert quorums.in_fibers(SIZE, FP64, work) == [1.0] * SIZE


def test_step_that_diverges_changes_no_weight():
    def work(member: Member) -> Member:
        exchange: Any = member.rank.engine.collectives
        if member.peers.rank == 1:
            exchange.push = _broken(exchange.push)
        with pytest.raises(Diverged, match="norm nan"):
            quorums.trained(FP64)(member)
        return member

    members = quorums.in_fibers(SIZE, FP64, work)

    assert torch.equal(
        flat(FP64, members), sharded.whole(FP64, [_fresh(rank) for rank in range(SIZE)])
    )


def _broken(push: Callable[..., None]) -> Callable[..., None]:
    return lambda unit, gradient: push(unit, gradient.fill_(torch.nan))


def _fresh(rank: int) -> Any:
    return sharded.filled(FP64, rank=rank, size=SIZE)


# Memory, latency, policies


def test_nothing_is_kept_after_the_steps():
    def work(member: Member) -> tuple[int, int]:
        quorums.trained(FP64)(member)
        member.rank.engine.free()
        return member.rank.owner.accumulator.nbytes, member.rank.engine.nbytes

    assert quorums.in_fibers(SIZE, FP64, work) == [(0, 0)] * SIZE


def test_latency_changes_no_bit():
    latency = [[0.0, 0.03, 0.2], [0.03, 0.0, 0.1], [0.2, 0.1, 0.0]]

    far = quorums.in_fibers(
        SIZE, FP32, quorums.trained(FP32), latency=latency, deadline_seconds=100
    )

    near = quorums.in_fibers(SIZE, FP32, quorums.trained(FP32))
    assert torch.equal(flat(FP32, far), flat(FP32, near))


def test_weights_that_are_told_are_those_of_the_step():
    """What a save writes, whatever the training thread does meanwhile."""
    seen: dict[int, list[Any]] = {}
    opened = quorums.opened

    def opening(training: Training, peers: Peers, *args: Any, **options: Any) -> Member:
        member = opened(training, peers, *args, **options)
        shard = member.rank.owner.shard

        def told(outcome: Any) -> None:
            state = [shard.of(k, "weights").clone() for k in range(len(shard.owned))]
            seen.setdefault(peers.rank, []).append((outcome.step, state))

        member.rank.owner._told = told  # noqa: SLF001
        return member

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quorums, "opened", opening)
        quorums.in_fibers(SIZE, FP64, quorums.trained(FP64, sleeps(DEADLINE + 1)))

    short = Training(steps=2, dtype=torch.float64)
    wanted = quorums.alone(short, {1: ALL, 2: frozenset({0, 1})}, SIZE)
    whole = torch.full((FP64.units.layout.size,), torch.nan, dtype=torch.float64)
    for rank, states in seen.items():
        assert [step for step, _ in states] == [1, 2, 3, 4]
        for span, values in zip(_fresh(rank).owned, states[1][1], strict=True):
            span.of(whole).copy_(values)
    assert max(sharded.differences(FP64, whole, wanted)) < BOUND


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before + 4, threading.enumerate()


def test_policy_is_the_same_for_strict_and_quorum_when_nobody_may_miss():
    alike = Policy(kind="quorum", size=SIZE, min_workers=SIZE, deadline_seconds=1)

    assert (
        alike.needed == Policy(kind="strict", size=SIZE, min_workers=1, deadline_seconds=1).needed
    )
