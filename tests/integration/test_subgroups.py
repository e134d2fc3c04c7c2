"""Sub-groups and sends of every transport in one process: the same sums, bits and refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives import subgroups
from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.errors import ConfigError, GroupBroken, LayoutMismatch, MissingRanks
from tests.rank_groups import TRANSPORTS, key, threads, values
from tests.ranks import divides

ALL = TRANSPORTS | {"local, threads inline": partial(threads, is_inline=True)}


@pytest.fixture(params=ALL)
def transport(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return ALL[request.param]


@pytest.fixture(params=[name for name in ALL if "TLS" not in name])
def unsecured(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return ALL[request.param]


every_way = pytest.mark.parametrize("way", ["ring", "direct"])


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    pairs = {name: (one, wanted[name]) for name, one in found.items()}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


def parts_of(ranks: Collectives, *members: list[int]) -> list[Any]:
    return ranks.subgroups(members)


# What comes out


@every_way
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_subgroups_add_in_the_order_of_their_own_numbers(unsecured, way, size):
    found = unsecured(size, way, divides.collected)

    assert [differing(one, divides.wanted(size, k)) for k, one in enumerate(found)] == [[]] * size


def test_subgroups_turned_round_add_to_other_bits():
    """The control of the order."""
    one, other = (divides.sums_of(m, 1_003, torch.float32) for m in ([0, 1, 2], [2, 1, 0]))

    assert not torch.equal(torch.cat(one), torch.cat(other))


@pytest.mark.parametrize("size", [2, 4])
def test_sends_bring_each_rank_what_was_meant_for_it(unsecured, size):
    found = unsecured(size, "ring", divides.sent)

    assert [differing(one, divides.came(size, k)) for k, one in enumerate(found)] == [[]] * size


@pytest.mark.parametrize("name", [name for name in ALL if "TLS" in name])
def test_subgroups_and_sends_are_the_same_with_tls(name):
    def work(ranks: Collectives) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return divides.collected(ranks), divides.sent(ranks)

    for rank, (sums, sends) in enumerate(ALL[name](3, "direct", work)):
        assert differing(sums, divides.wanted(3, rank)) == []
        assert differing(sends, divides.came(3, rank)) == []


def test_overlapping_subgroups_are_used_in_turns_with_one_key(unsecured):
    def work(ranks: Collectives) -> list[list[float]]:
        pairs = parts_of(ranks, [0, 1], [1, 2], [2, 0])
        found = []
        for _, part in zip(range(3), pairs, strict=True):
            if part is not None:
                own = torch.tensor([10.0**ranks.rank])
                part.all_reduce(key(1), own).wait()
                found.append(own.tolist())
        return found

    assert unsecured(3, "ring", work) == [[[11.0], [101.0]], [[11.0], [110.0]], [[110.0], [101.0]]]


def test_several_are_begun_before_any_is_waited_for(unsecured):
    def work(ranks: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        [part] = parts_of(ranks, [1, 0])
        whole, own, came = values(ranks.rank, 900), values(ranks.rank, 900), torch.zeros(900)
        other = 1 - part.rank
        begun = [ranks.all_reduce(key(1), whole), part.all_reduce(key(1), own)]
        if part.rank == 0:
            begun.append(part.send(key(1), values(7, 900), to=other))
            begun.append(part.receive(key(1, unit=1), came, source=other))
        else:
            begun.append(part.receive(key(1), came, source=other))
            begun.append(part.send(key(1, unit=1), values(8, 900), to=other))
        for handle in reversed(begun):
            handle.wait()
        return whole, own, came

    found = unsecured(2, "ring", work)

    whole, own = (torch.cat(divides.sums_of(m, 900, torch.float32)) for m in ([0, 1], [1, 0]))
    for rank, got in enumerate(found):
        wanted = (whole, own, values(7 if rank == 0 else 8, 900))
        assert all(map(torch.equal, got, wanted))


def test_bytes_of_subgroups_and_sends_are_counted(unsecured):
    def work(ranks: Collectives) -> tuple[int, int]:
        [part] = parts_of(ranks, [2, 0])
        if part is not None:
            part.all_reduce(key(1), values(ranks.rank, 1_000)).wait()
        if ranks.rank == 1:
            ranks.send(key(2), torch.zeros(500, dtype=torch.int64), to=0).wait()
        if ranks.rank == 0:
            ranks.receive(key(2), torch.zeros(500, dtype=torch.int64), source=1).wait()
        traffic: Any = ranks
        return traffic.traffic.sent, traffic.traffic.received

    header = 32
    assert unsecured(3, "direct", work) == [
        (4_000, 4_000 + 4_000 + header),
        (4_000 + header, 0),
        (4_000, 4_000),
    ]


# What is never taken for something else


def test_send_of_a_subgroup_is_not_taken_by_the_group_nor_by_another_one(unsecured):
    """The same ranks, key, dtype and length: only the sub-group differs."""

    def work(ranks: Collectives) -> list[Any]:
        one, other = parts_of(ranks, [0, 1], [0, 1])
        if ranks.rank == 0:
            one.send(key(1), values(3, 40), to=1).wait()
            return []
        found: list[Any] = []
        for wrong in (ranks, other):
            out = torch.zeros(40)
            with pytest.raises(MissingRanks) as refused:
                wrong.receive(key(1), out, source=0).wait()
            found += [refused.value.ranks, bool(out.any())]
        out = torch.zeros(40)
        one.receive(key(1), out, source=0).wait()  # it was there all the time
        return [*found, torch.equal(out, values(3, 40))]

    assert unsecured(2, "ring", work, timeout_seconds=1.5)[1] == [(0,), False, (0,), False, True]


def test_sum_of_a_subgroup_is_not_that_of_the_group(unsecured):
    def work(ranks: Collectives) -> float:
        [part] = parts_of(ranks, [0, 1])
        own = torch.tensor([1.0])
        with pytest.raises(MissingRanks):
            (part if ranks.rank else ranks).all_reduce(key(1), own).wait()
        return 0.0

    assert unsecured(2, "direct", work, timeout_seconds=0.6) == [0.0, 0.0]


def test_send_is_not_taken_for_a_broadcast(unsecured):
    def work(ranks: Collectives) -> bool:
        if ranks.rank == 0:
            ranks.send(key(1), values(3, 40), to=1).wait()
            return True
        out = torch.zeros(40)
        with pytest.raises(MissingRanks):
            ranks.broadcast(key(1), out, source=0).wait()
        return bool(out.any())

    assert unsecured(2, "ring", work, timeout_seconds=1.5) == [True, False]


def test_messages_are_mixed_up_where_all_subgroups_have_one_number(monkeypatch):
    """The control: with one number for all, two sub-groups that sum at once lose each other's."""
    monkeypatch.setattr(subgroups, "number", lambda *_: 7)

    def work(ranks: Collectives) -> str:
        one, other = parts_of(ranks, [0, 1], [0, 1])
        own = torch.tensor([1.0])
        one.all_reduce(key(1), own).wait()
        try:
            other.all_reduce(key(1), own).wait()
        except MissingRanks:
            return "lost"
        return "kept"

    assert "lost" in threads(2, "ring", work, timeout_seconds=0.3)


def test_subgroups_of_different_lists_exchange_nothing(unsecured):
    def work(ranks: Collectives) -> tuple[int, ...]:
        members = ([0, 1], [1, 2]) if ranks.rank == 0 else ([0, 1], [2, 1])
        part = parts_of(ranks, *members)[0]
        if part is None:
            return ()
        with pytest.raises(MissingRanks) as refused:
            part.barrier(key(1)).wait()
        return refused.value.ranks

    assert unsecured(3, "ring", work, timeout_seconds=0.6) == [(1,), (0,), ()]


# What is refused


def test_missing_rank_of_a_subgroup_is_named_by_both_its_numbers(unsecured):
    def work(ranks: Collectives) -> tuple[tuple[int, ...], str]:
        [part] = parts_of(ranks, [2, 0])
        if ranks.rank != 2:
            return (), ""
        with pytest.raises(MissingRanks) as refused:
            part.all_reduce(key(1), values(2, 1_003)).wait()
        return refused.value.ranks, str(refused.value)

    ranks, told = unsecured(3, "direct", work, timeout_seconds=0.6)[2]

    assert ranks == (1,)
    assert "rank 1 (0 of the whole group) within 0.6 s; nothing is filled in" in told


def test_rank_that_sends_nothing_is_named(unsecured):
    def work(ranks: Collectives) -> tuple[int, ...]:
        if ranks.rank != 1:
            return ()
        out = torch.zeros(4)
        with pytest.raises(MissingRanks, match="nothing is filled in") as refused:
            ranks.receive(key(1), out, source=2).wait()
        assert not out.any()
        return refused.value.ranks

    assert unsecured(3, "ring", work, timeout_seconds=0.6) == [(), (2,), ()]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(0), "0 elements of float32"),
        (torch.zeros(39), "39 elements of float32"),
        (torch.zeros(41), "41 elements of float32"),
        (torch.zeros(20, dtype=torch.float64), "20 elements of float64"),
        (torch.zeros(40, dtype=torch.int32), "40 elements of int32"),
    ],
    ids=["none", "shorter", "longer", "as many bytes", "dtype"],
)
def test_send_of_another_length_or_dtype_is_refused(transport, given, told):
    def work(ranks: Collectives) -> tuple[str, list[float]]:
        if ranks.rank == 0:
            ranks.send(key(1), given, to=1).wait()
            return "", []
        out = torch.full((40,), 7.0)
        with pytest.raises(LayoutMismatch) as refused:
            ranks.receive(key(1), out, source=0).wait()
        return str(refused.value), out.unique().tolist()

    _, (sentence, left) = transport(2, "ring", work)

    assert f"rank 0 sends {told}, and this rank receives 40 of float32" in sentence
    assert left == [7.0]


def alone(size: int = 3) -> Any:
    return LocalGroup(size, clock=SystemClock()).rank(1, Inline())


@pytest.mark.parametrize("other", [-1, 1, 3])
def test_sends_to_oneself_and_to_strangers_are_refused(other):
    ranks = alone()

    with pytest.raises(ConfigError, match=f"to={other} is not another one of size=3"):
        ranks.send(key(), torch.zeros(1), to=other)
    with pytest.raises(ConfigError, match=f"source={other} is not another one of size=3"):
        ranks.receive(key(), torch.zeros(1), source=other)
    assert ranks.traffic.sent == 0


@pytest.mark.parametrize(
    "given", [torch.zeros(2, 2), torch.zeros(6)[::2]], ids=["shape", "strides"]
)
def test_send_of_a_tensor_that_is_not_flat_is_refused(given):
    with pytest.raises(LayoutMismatch, match="flat contiguous"):
        alone().send(key(), given, to=0)
    with pytest.raises(LayoutMismatch, match="flat contiguous"):
        alone().receive(key(), given, source=0)


@pytest.mark.parametrize("members", [[], [0, 0], [3], [-1, 0]])
def test_lists_that_are_no_subgroups_are_refused(members):
    with pytest.raises(ConfigError, match="no sub-group of size=3 ranks"):
        alone().subgroups([[0, 1], members])


# How they end


@pytest.mark.parametrize("who", ["group", "sub-group"])
def test_abort_of_one_ends_all_of_them(unsecured, who):
    def work(ranks: Collectives) -> list[str]:
        if ranks.rank == 1:
            return []
        [part] = parts_of(ranks, [1, 0])
        [inner] = parts_of(part, [0, 1])
        begun = part.barrier(key(1))
        (ranks if who == "group" else inner).abort(GroupBroken("rank 1 left"))
        found = []
        for handle in (begun, ranks.barrier(key(2)), part.barrier(key(3)), inner.barrier(key(4))):
            with pytest.raises(GroupBroken) as refused:
                handle.wait()
            found.append(str(refused.value))
        return found

    assert unsecured(2, "ring", work)[0] == ["rank 1 left"] * 4


@pytest.mark.parametrize("name", [name for name in ALL if "fibers" not in name])
def test_subgroup_ends_with_its_group(name):
    def work(ranks: Any) -> str:
        [part] = parts_of(ranks, [1, 0])
        ranks.close()
        with pytest.raises(GroupBroken) as refused:
            part.barrier(key(1)).wait()
        return str(refused.value)

    assert all("this rank has left its group" in told for told in ALL[name](2, "ring", work))
