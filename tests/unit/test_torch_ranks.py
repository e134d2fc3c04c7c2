"""Collectives on torch.distributed, and the door of a launch, with a gloo that is played."""

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.collectives import plain, torch_dist, torch_member, torch_wire
from atoll.collectives.base import Key
from atoll.collectives.torch_member import TorchMember
from atoll.errors import GroupBroken, ProtocolError
from atoll.island.sharded import torch_host
from atoll.island.sharded.torch_host import TorchHost
from atoll.protocol.manifest import ShardedSettings
from atoll.protocol.sharded import GroupReply, RankMember
from atoll.traffic import Traffic

STEP = Key(group=1, step=1, op="reduce")


def test_what_comes_after_an_abort_is_written_nowhere(monkeypatch):
    """Who waits is sent away at once, and frees its tensors; gloo ends later."""
    is_asked, comes = threading.Event(), threading.Event()

    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        is_asked.set()
        comes.wait(10)
        for row in rows:
            row.copy_(own)

    ranks = played(monkeypatch, all_gather=all_gather)
    out = torch.zeros(8)
    begun = ranks.all_gather(Key(group=1, step=1, op="gather"), torch.ones(4), out)

    assert is_asked.wait(10)
    ranks.abort(GroupBroken("group 1 is over"))
    with pytest.raises(GroupBroken, match="group 1 is over"):
        begun.wait()
    comes.set()
    ranks.close()

    assert out.tolist() == [0.0] * 8


def test_native_sum_that_comes_after_an_abort_is_written_nowhere(monkeypatch):
    is_asked, comes = threading.Event(), threading.Event()

    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        for row in rows:
            row.copy_(own)

    def all_reduce(values: Tensor) -> None:
        is_asked.set()
        comes.wait(10)
        values.mul_(2)

    ranks = played(monkeypatch, all_gather=all_gather, all_reduce=all_reduce, native_sum=True)
    values = torch.ones(8)
    begun = ranks.all_reduce(STEP, values)

    assert is_asked.wait(10)
    ranks.abort(GroupBroken("group 1 is over"))
    with pytest.raises(GroupBroken, match="group 1 is over"):
        begun.wait()
    comes.set()
    ranks.close()

    assert values.tolist() == [1.0] * 8


@pytest.mark.parametrize("is_aborted", [False, True])
def test_native_sum_in_several_chunks_is_whole(monkeypatch, is_aborted):
    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        for row in rows:
            row.copy_(own)

    def all_reduce(values: Tensor) -> None:
        values.mul_(2)

    ranks = played(
        *(monkeypatch,),
        all_gather=all_gather,
        all_reduce=all_reduce,
        native_sum=True,
        chunk_bytes=12,
    )
    values = torch.arange(8.0)
    if is_aborted:  # the control: then nothing is begun
        ranks.abort(GroupBroken("group 1 is over"))
        with pytest.raises(GroupBroken):
            ranks.all_reduce(STEP, values).wait()
    else:
        ranks.all_reduce(STEP, values).wait()
    ranks.close()

    assert values.tolist() == [k * (1.0 if is_aborted else 2.0) for k in range(8)]


def test_abort_waits_while_tensors_are_written(monkeypatch):
    """Else whoever is sent away would free them under the hands of the thread that adds up."""
    was_over: list[bool] = []

    def all_to_all(came: Tensor, room: Tensor, *_: object) -> None:
        came.copy_(room)  # stamps, and as many bytes as this rank sends

    def add_up(parts: Any, own: Tensor, total: Tensor) -> None:
        aborting = threading.Thread(target=ranks.abort, args=(GroupBroken("group 1 is over"),))
        aborting.start()
        aborting.join(0.2)
        was_over.append(not aborting.is_alive())

    monkeypatch.setattr(plain, "add_up", add_up)
    ranks = played(monkeypatch, all_to_all=all_to_all)
    values = torch.ones(8)
    begun = ranks.reduce_scatter(STEP, values, torch.zeros(4))
    with suppress(GroupBroken):
        begun.wait()
    ranks.close()

    assert was_over == [False]


def test_bytes_between_ranks_are_counted(monkeypatch):
    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        for row in rows:
            row.copy_(own)

    ranks = played(monkeypatch, all_gather=all_gather)
    ranks.all_gather(STEP, torch.ones(4), torch.zeros(8)).wait()
    ranks.close()

    assert (ranks.traffic.sent, ranks.traffic.received) == (16, 16)


def played(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> torch_dist.TorchRanks:
    """Rank 0 of 2, whose gloo does what `calls` say."""
    options = {name: calls.pop(name) for name in ("native_sum", "chunk_bytes") if name in calls}
    wire = SimpleNamespace(rank=0, size=2, **calls)
    monkeypatch.setattr(torch_wire, "of_group", lambda _: wire)
    group: Any = None
    return torch_dist.TorchRanks(group, **options)


# The door of a launch


class Beside:
    """A host whose groups nobody looks into."""

    traffic = None

    def enter(self, *_: object, **__: object) -> object:
        return object()

    def close(self) -> None:
        pass


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> TorchHost:
    """Of the process that torchrun made rank 1 of 2."""
    return opened(monkeypatch)


def opened(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_stuck: bool = False,
    abandon: Callable[[], None] = lambda: None,
) -> TorchHost:
    member = SimpleNamespace(is_stuck=is_stuck)
    monkeypatch.setattr(torch_host, "gloo_group", lambda **_: None)
    monkeypatch.setattr(torch_host, "TorchMember", lambda *_, **__: member)
    beside: Any = Beside()
    island: Any = SimpleNamespace(rank=1, size=2, abandon=abandon, training=nullcontext)
    return TorchHost(beside, island, "a" * 32, deadline_seconds=1.0)


def entered(door: TorchHost, *, rank: int, size: int) -> None:
    members = tuple(RankMember(worker_id=f"island-{k}", address="x:1") for k in range(size))
    formed = GroupReply(action="train", group=7, members=members)
    source: Any = None
    door.enter(formed, rank, source=source, settings=ShardedSettings())


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3)])
def test_group_that_is_not_the_launch_is_refused(door, rank, size):
    """A coordinator that mixed launches would have sums of strangers."""
    with pytest.raises(ProtocolError, match=f"rank {rank} of {size}, and torchrun made it 1 of 2"):
        entered(door, rank=rank, size=size)

    entered(door, rank=1, size=2)  # the control


def test_process_of_a_launch_is_in_one_group_only(door):
    entered(door, rank=1, size=2)

    with pytest.raises(GroupBroken, match="group=7 comes after another one"):
        entered(door, rank=1, size=2)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_launch_of_a_process_that_gloo_holds_is_not_waited_for(monkeypatch, is_stuck):
    """To let the process group go would wait for what it has under way."""
    abandoned: list[bool] = []
    door = opened(monkeypatch, is_stuck=is_stuck, abandon=lambda: abandoned.append(True))
    entered(door, rank=1, size=2)

    door.close()

    assert abandoned == [True] * is_stuck


@pytest.mark.parametrize("is_stuck", [False, True])
def test_member_that_leaves_does_not_wait_for_gloo(monkeypatch, is_stuck):
    is_asked, comes = threading.Event(), threading.Event()

    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        is_asked.set()
        comes.wait(10)
        for row in rows:
            row.copy_(own)

    closed: list[str] = []
    calls: Any = SimpleNamespace(close=lambda: closed.append("closed"))
    played(monkeypatch, all_gather=all_gather).close()
    monkeypatch.setattr(torch_member, "CLOSE_SECONDS", 0.2 if is_stuck else 10.0)
    group: Any = None
    member = TorchMember(group, calls, timeout_seconds=60.0, traffic=Traffic())
    begun = member.barrier(STEP)
    assert is_asked.wait(10)
    if not is_stuck:
        comes.set()

    member.close()

    with suppress(GroupBroken):
        begun.wait()
    assert (member.is_stuck, closed) == (is_stuck, ["closed"])
    comes.set()
