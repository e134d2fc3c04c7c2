"""Streams that break and peers that stand still: every message counts once, and the bits stay."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives.base import Key, Label
from atoll.collectives.exchange import Way
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.member import Bulk, RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import RankGroup
from atoll.collectives.mailbox import Mailbox
from atoll.errors import GroupBroken, MissingRanks, StaleGeneration
from atoll.layout import Span
from tests import rank_process, ranks_on_loopback
from tests.cables import Cable, cable

CLOCK = SystemClock()
ELEMENTS = 700_001
NEAR, FAR = "127.0.0.1", "127.0.0.2"

every_bulk = pytest.mark.parametrize("bulk", ["grpc", "tcp"])
plain_and_tls = pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])


def values(rank: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))


def key(step: int, *, group: int = 1) -> Key:
    return Key(group=group, step=step, op="reduce")


def reduced(ranks: Sequence[RankMember], step: int, *, group: int = 1) -> list[Tensor]:
    """What the ranks have after an all-reduce."""

    def work(one: RankMember) -> Tensor:
        own = values(one.rank)
        one.all_reduce(key(step, group=group), own).wait()
        return own

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def far_from(stack: ExitStack, server: RankServer, bulk: Bulk, cut_after: int) -> list[Cable]:
    """Cables to all of a server's ports, at another host; the one that carries bulk is cut."""
    ports = [int(server.address.rpartition(":")[2]), server.bulk_port]
    cut = {"grpc": (cut_after, None), "tcp": (None, cut_after)}[bulk]
    return [
        stack.enter_context(cable(f"{NEAR}:{port}", listen=f"{FAR}:{port}", cut_after=after))
        for port, after in zip(ports, cut, strict=True)
    ]


@every_bulk
@plain_and_tls
@pytest.mark.parametrize("way", ["ring", "direct"])
def test_stream_cut_in_the_middle_is_dialled_again_and_the_bits_stay(bulk, is_tls, way):
    """In the middle of a message, after several others."""
    with ranks_on_loopback.servers(3, is_tls=is_tls) as made, ExitStack() as stack:
        wires = far_from(stack, made.servers[1], bulk, cut_after=ELEMENTS + 1_234)
        addresses = [server.address for server in made.servers]
        addresses[1] = addresses[1].replace(NEAR, FAR)
        group = made.group_at(addresses)
        members = [
            stack.enter_context(
                made.member(rank, group=group, way=way, bulk=bulk, chunk_bytes=1 << 16)
            )
            for rank in range(3)
        ]

        found = reduced(members, 1)

        carried = wires[1] if bulk == "tcp" else wires[0]
        assert carried.cuts == 1, "the control: it was cut"
        # gRPC shares one connection between the ranks of this process.
        dialled = 2 if (bulk, way) == ("tcp", "direct") else 1
        assert carried.connections > dialled, "and dialled again"
    for own in found:
        assert torch.equal(own, expected(way))


def expected(way: Way) -> Tensor:
    """Added part by part in the canonical order, by plain additions."""
    del way  # both give the same
    bounds = [k * ELEMENTS // 3 for k in range(4)]
    added = [values((k + 1) % 3) + values((k + 2) % 3) + values(k) for k in range(3)]
    return torch.cat([added[k][bounds[k] : bounds[k + 1]] for k in range(3)])


@every_bulk
@plain_and_tls
def test_next_group_goes_on_where_a_rank_of_the_last_one_is_still_sending(bulk, is_tls):
    """Rank 2 stays in group 1 and sends; ranks 0 and 1 are group 2 and hear nothing of it."""
    with ranks_on_loopback.servers(3, is_tls=is_tls) as made, ExitStack() as stack:
        addresses = [server.address for server in made.servers]
        former = made.member(2, bulk=bulk, timeout_seconds=2)
        stack.callback(former.close)
        for rank in range(2):
            made.member(rank, bulk=bulk).close()
        begun = former.all_reduce(key(1), values(2))
        pair = RankGroup(
            2, made.group_at(addresses).members[:2], "the secret of the two that are left"
        )
        members = [
            stack.enter_context(made.member(rank, group=pair, bulk=bulk)) for rank in range(2)
        ]

        found = reduced(members, 1, group=2)

        with pytest.raises((StaleGeneration, MissingRanks)):
            begun.wait()
    for own in found:
        assert torch.equal(own, values(0) + values(1))


@every_bulk
def test_ranks_that_enter_one_after_the_other_do_not_break_the_group(bulk):
    """Rank 1 is still in the group before when rank 0 sends for the new one."""
    with ranks_on_loopback.servers(2) as made, ExitStack() as stack:
        addresses = [server.address for server in made.servers]
        later = made.group_at(addresses, number=2, secret="l" * 32)
        before = made.member(1, bulk=bulk)
        first = stack.enter_context(made.member(0, group=later, bulk=bulk, timeout_seconds=20))
        begun = first.all_reduce(key(1, group=2), own := values(0))
        before.close()
        second = stack.enter_context(made.member(1, group=later, bulk=bulk, timeout_seconds=20))

        second.all_reduce(key(1, group=2), values(1)).wait()
        begun.wait()

    assert torch.equal(own, values(0) + values(1))


@every_bulk
def test_rank_that_leaves_when_all_is_said_breaks_nothing_for_the_others(bulk):
    """Rank 0 is done with the first sum and goes; ranks 1 and 2 still speak to each other."""
    with ranks_on_loopback.servers(3) as made, ExitStack() as stack:
        options = {"bulk": bulk, "way": "direct", "timeout_seconds": 20}
        members = [made.member(rank, **options) for rank in range(3)]
        for member in members:
            stack.callback(member.close)
        reduced(members, 1)
        members[0].close()

        members[1].broadcast(key(2), own := values(1), source=1)
        # From rank 1's stream alone; rank 0 hears of it no more.
        members[2].broadcast(key(2), came := torch.zeros(ELEMENTS), source=1).wait()

    assert torch.equal(came, own)


@every_bulk
def test_closing_waits_for_nobody(bulk):
    """A peer takes the connection and never answers."""
    with ranks_on_loopback.servers(2) as made, ExitStack() as stack:
        silent = stack.enter_context(cable(made.servers[1].address))
        group = made.group_at([made.servers[0].address, silent.address])
        member = made.member(0, group=group, bulk=bulk)
        begun = member.all_reduce(key(1), values(0))
        closed = threading.Thread(target=member.close)
        closed.start()
        closed.join(5)

        assert not closed.is_alive()
        with pytest.raises(GroupBroken):
            begun.wait()


@every_bulk
def test_abort_reaches_who_waits_for_its_messages_to_be_taken(bulk):
    """A broadcast is done when the others have it; nobody takes anything here."""
    with ranks_on_loopback.servers(2) as made, made.member(0, bulk=bulk) as first:
        begun = first.broadcast(key(1), values(0), source=0)
        first.abort(StaleGeneration("group 1 is over"))

        with pytest.raises(StaleGeneration, match="group 1 is over"):
            begun.wait()


@every_bulk
def test_memory_may_be_used_again_once_a_collective_is_done(bulk):
    """What was sent is answered; later writes to the tensor do not reach the others."""
    with ranks_on_loopback.ranks(2, bulk=bulk, way="direct") as members:
        for step in range(1, 6):
            sources = [values(rank) for rank in range(2)]
            begun = [
                one.all_reduce(key(step), own) for one, own in zip(members, sources, strict=True)
            ]
            for handle, own in zip(begun, sources, strict=True):
                handle.wait()
                assert torch.equal(own, values(0) + values(1))
                own.fill_(float("nan"))


def test_server_that_closes_answers_what_it_has_taken():
    """A process ends after its last sum; who sent to it still waits for the answer."""
    asks, closes = threading.Event(), threading.Event()
    label = Label(key(1), 0, Span(0, 4))

    def parts() -> Iterator[bytes]:
        yield messages.packed(label, memoryview(b"four"))
        asks.wait(10)
        yield messages.ASK
        closes.wait(10)

    box = Mailbox(group=1, rank=0, size=2, clock=CLOCK, limit_bytes=8)
    with ranks_on_loopback.servers(2) as made, dial.channel(made.group, 0, None) as channel:
        made.servers[0].enter(made.group, box)
        deliver: Any = channel.stream_stream(f"/{dial.SERVICE}/Deliver")
        answers = deliver(parts(), metadata=made.group.metadata(1))
        taken = box.take(label, 1, nbytes=4, until=CLOCK.now() + 10)
        ending = threading.Thread(target=made.servers[0].close)
        ending.start()
        ending.join(0.1)
        asks.set()

        assert bytes(taken) == b"four"
        assert messages.count_of(next(answers)) == 1
        closes.set()
        ending.join()


@every_bulk
@plain_and_tls
def test_memory_may_be_used_again_after_a_collective_failed(bulk, is_tls):
    """A peer that comes late gets nothing, and not what is in the memory by then."""
    with ranks_on_loopback.ranks(2, bulk=bulk, is_tls=is_tls, timeout_seconds=1) as (one, late):
        own, came = torch.ones(16 << 20), torch.zeros(16 << 20)  # more than buffers hold
        with pytest.raises(MissingRanks):
            one.broadcast(key(1), own, source=0).wait()
        own.untyped_storage().resize_(0)
        with pytest.raises(MissingRanks):
            late.broadcast(key(1), came, source=0).wait()

        assert came.unique().tolist() == [0.0, 1.0]  # the control: what it had taken in before
        one.broadcast(key(2), sent := values(0), source=0)
        late.broadcast(key(2), again := torch.zeros(ELEMENTS), source=0).wait()
        assert torch.equal(again, sent)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Rank 1 in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.rank_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()


def test_peer_that_is_stopped_and_goes_on_changes_nothing(other):
    """A deadline that is longer than the stop; once over each carrier, in the middle of a sum."""
    assert other.stdin is not None
    assert other.stdout is not None
    clock, server = SystemClock(), RankServer("127.0.0.1:0")
    address = other.stdout.readline().strip()
    print(server.address, file=other.stdin, flush=True)
    with closing(server), ThreadPoolExecutor(1) as pool:
        for number, bulk in enumerate(rank_process.BULKS, start=1):
            group = rank_process.group(number, server.address, address)
            with RankMember(group, 0, server, clock=clock, bulk=bulk) as ranks:  # type: ignore[arg-type]
                for step in range(1, rank_process.STEPS + 1):
                    own = rank_process.values(0, step)
                    if step == 2:
                        os.kill(other.pid, signal.SIGSTOP)
                    done = pool.submit(ranks.all_reduce(key(step, group=number), own).wait)
                    if step == 2:
                        with pytest.raises(TimeoutError):  # the control: it was stopped
                            done.result(0.5)
                        os.kill(other.pid, signal.SIGCONT)
                    done.result(60)
                    wanted = rank_process.values(0, step) + rank_process.values(1, step)
                    assert torch.equal(own, wanted)
                    said = other.stdout.readline().split()
                    assert said == [str(step), str(float(own.double().sum()))]
                print(file=other.stdin, flush=True)


@every_bulk
def test_peer_that_is_gone_is_named_at_the_deadline(bulk):
    with (
        ranks_on_loopback.servers(2) as made,
        made.member(0, bulk=bulk, timeout_seconds=1.0) as first,
    ):
        second = made.member(1, bulk=bulk, timeout_seconds=20)
        reduced([first, second], 1)
        second.close()
        made.servers[1].close()

        with pytest.raises(MissingRanks) as refused:
            first.all_reduce(key(2), values(0)).wait()

    assert refused.value.ranks == (1,)
