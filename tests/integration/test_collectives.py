"""Every transport's collectives: the same sums, the same bits, and the same refusals."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.codecs.int8.codec import Int8
from atoll.collectives import schedule
from atoll.collectives.base import Collectives
from atoll.collectives.codecs import WireCodec
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.errors import ConfigError, GroupBroken, LayoutMismatch, MissingRanks, ProtocolError
from tests.rank_groups import DTYPES, TRANSPORTS, added, equal, key, sums, threads, values
from tests.ranks.collects import swapped

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 5)
# Of elements: none, fewer than ranks, one, uneven, several chunks of several parts.
LENGTHS = (0, 1, 3, 7, 1_000, 10_007)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return TRANSPORTS[request.param]


every_way = pytest.mark.parametrize("way", ["ring", "direct"])
every_size = pytest.mark.parametrize("size", SIZES)


@every_way
def test_bytes_between_ranks_are_counted(transport, way):
    def work(ranks):
        out = torch.zeros(len(schedule.cut(10_007, 3)[ranks.rank]))
        ranks.reduce_scatter(key(0), values(ranks.rank, 10_007), out).wait()
        ranks.all_gather(key(1), out, torch.zeros(10_007)).wait()
        return ranks.traffic.sent, ranks.traffic.received

    found = transport(3, way, work)

    # Each value reaches two more ranks in either exchange.
    assert [sum(side) for side in zip(*found, strict=True)] == [2 * 2 * 4 * 10_007] * 2


# What comes out


# One group of ranks for all lengths, or dtypes: servers cost more than what they are asked.


def of_each(
    asked: Iterable[Any], one: Callable[[Collectives, Any, int], T]
) -> Callable[[Collectives], list[T]]:
    """Work that does `one` for each of `asked` in turn, with a number of its own."""
    return lambda ranks: [one(ranks, what, number) for number, what in enumerate(asked)]


@every_way
@every_size
def test_reduce_scatter_adds_in_the_canonical_order(transport, way, size):
    def one(ranks: Collectives, length: int, number: int) -> Tensor:
        span = schedule.cut(length, size)[ranks.rank]
        out = torch.full((len(span),), -7.0)
        ranks.reduce_scatter(key(number), values(ranks.rank, length), out).wait()
        return out

    found = transport(size, way, of_each(LENGTHS, one))

    wanted = [sums(size, length, torch.float32) for length in LENGTHS]
    assert all(map(equal, zip(*found, strict=True), wanted))


@every_way
@pytest.mark.parametrize("size", [2, 3, 5])
def test_reduce_scatter_takes_every_dtype(transport, way, size):
    def one(ranks: Collectives, dtype: torch.dtype, number: int) -> Tensor:
        own = values(ranks.rank, 1_003, dtype)
        out = schedule.cut(1_003, size)[ranks.rank].of(own)  # in place
        ranks.reduce_scatter(key(number), own, out).wait()
        return out

    found = transport(size, way, of_each(DTYPES, one))

    wanted = [sums(size, 1_003, dtype) for dtype in DTYPES]
    assert all(map(equal, zip(*found, strict=True), wanted))


def test_half_floats_are_rounded_once():
    """The control: added in half precision the same numbers give another sum."""
    wrong = values(1, 1_003, torch.bfloat16)
    for rank in (2, 0):
        wrong = wrong + values(rank, 1_003, torch.bfloat16)

    assert not torch.equal(wrong, added(0, 3, 1_003, torch.bfloat16))


def test_order_of_adding_shows_in_these_numbers():
    """The control of the canonical order."""
    turned = values(0, 1_000) + values(2, 1_000) + values(1, 1_000)

    assert not torch.equal(turned, added(0, 3, 1_000, torch.float32))


@every_way
@every_size
def test_all_gather_puts_the_parts_together(transport, way, size):
    def one(ranks: Collectives, length: int, number: int) -> Tensor:
        out = torch.zeros(length)
        shard = schedule.cut(length, size)[ranks.rank].of(values(0, length)).clone()
        ranks.all_gather(key(number, op="gather"), shard, out).wait()
        return out

    wanted = [values(0, length) for length in LENGTHS]
    assert all(equal(found, wanted) for found in transport(size, way, of_each(LENGTHS, one)))


@every_way
def test_all_gather_takes_every_dtype_and_a_part_of_the_result_itself(transport, way):
    def one(ranks: Collectives, dtype: torch.dtype, number: int) -> Tensor:
        whole, span = values(0, 1_003, dtype), schedule.cut(1_003, 3)[ranks.rank]
        out = torch.zeros_like(whole)
        span.of(out).copy_(span.of(whole))
        ranks.all_gather(key(number, op="gather"), span.of(out), out).wait()
        return out

    wanted = [values(0, 1_003, dtype) for dtype in DTYPES]
    assert all(equal(found, wanted) for found in transport(3, way, of_each(DTYPES, one)))


@every_way
@every_size
def test_all_reduce_gives_all_ranks_the_same_bits(transport, way, size):
    lengths = (0, 1, 1_003)

    def one(ranks: Collectives, length: int, number: int) -> Tensor:
        own = values(ranks.rank, length)
        ranks.all_reduce(key(number), own).wait()
        return own

    wanted = [torch.cat(sums(size, length, torch.float32)) for length in lengths]
    assert all(equal(found, wanted) for found in transport(size, way, of_each(lengths, one)))


@every_way
@pytest.mark.parametrize(("size", "source"), [(1, 0), (2, 1), (3, 0), (5, 3)])
def test_broadcast_gives_all_ranks_the_sources_values(transport, way, size, source):
    def work(ranks: Collectives) -> Tensor:
        own = values(ranks.rank, 1_003)
        ranks.broadcast(key(op="control"), own, source=source).wait()
        return own

    assert equal(transport(size, way, work), [values(source, 1_003)] * size)


@every_way
def test_several_may_be_under_way_and_are_waited_for_in_any_order(transport, way):
    def work(ranks: Collectives) -> list[Tensor]:
        made = [values(ranks.rank, 500 + k) for k in range(4)]
        handles = [ranks.all_reduce(key(1, unit=k), one) for k, one in enumerate(made)]
        for handle in reversed(handles):
            handle.wait()
        return made

    for found in transport(3, way, work):
        wanted = [torch.cat(sums(3, 500 + k, torch.float32)) for k in range(4)]
        assert equal(found, wanted)


@every_way
def test_barrier_is_passed_once_every_rank_has_come(transport, way):
    came: list[int] = []

    def work(ranks: Collectives) -> int:
        if ranks.rank != 2:
            ranks.barrier(key(1, op="control")).wait()
            return len(came)
        came.append(2)
        ranks.barrier(key(1, op="control")).wait()
        return 1

    assert transport(3, way, work) == [1, 1, 1]


@every_way
@every_size
def test_exchange_brings_each_rank_what_the_others_have_for_it(transport, way, size):
    def one(ranks: Collectives, base: int, number: int) -> list[bytes]:
        sent = [swapped(ranks.rank, to, base) for to in range(size)]
        sizes = [len(swapped(sender, ranks.rank, base)) for sender in range(size)]
        came = ranks.exchange(key(number, op="gather"), sent, sizes)
        assert came[ranks.rank] is sent[ranks.rank]
        return [part.numpy().tobytes() for part in came]

    bases = (0, 1, 700, 5_003)  # of none, one and several chunks
    found = transport(size, way, of_each(bases, one))

    for rank, by_base in enumerate(found):
        wanted = [[swapped(k, rank, base).numpy().tobytes() for k in range(size)] for base in bases]
        assert by_base == wanted


@every_way
@every_size
def test_all_gather_bytes_brings_all_ranks_what_each_says(transport, way, size):
    said = [b"", b"one", b"2" * 3_000, b"three" * 1_000, b"4"][:size]

    def one(ranks: Collectives, turn: int, number: int) -> list[bytes]:
        data = said[(ranks.rank + turn) % size]
        return ranks.all_gather_bytes(key(number, op="control"), data, limit=5_000)

    found = transport(size, way, of_each(range(2), one))

    assert found == [[said, said[1:] + said[:1]]] * size


# What is refused


def test_rank_that_says_too_much_is_named_on_all_ranks(transport):
    def work(ranks: Collectives) -> tuple[str, list[bytes]]:
        with pytest.raises(ProtocolError) as refused:
            ranks.all_gather_bytes(key(1), b"x" * (10 + (ranks.rank == 2)), limit=10)
        return str(refused.value), ranks.all_gather_bytes(key(2), b"after", limit=10)

    found = transport(3, "direct", work)

    assert all("rank 2 has 11 bytes to say; at most 10" in told for told, _ in found)
    assert [after for _, after in found] == [[b"after"] * 3] * 3


def test_exchange_names_the_rank_whose_bytes_do_not_come(transport):
    def work(ranks: Collectives) -> tuple[int, ...]:
        if ranks.rank == 1:
            return ()
        with pytest.raises(MissingRanks, match="nothing is filled in") as refused:
            ranks.exchange(key(), [torch.ones(3, dtype=torch.uint8)] * 3, [3] * 3)
        return refused.value.ranks

    assert transport(3, "direct", work, timeout_seconds=0.8) == [(1,), (), (1,)]


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ([torch.zeros(1, dtype=torch.uint8)], [1, 1]),
        ([torch.zeros(1, dtype=torch.uint8)] * 2, [1]),
        ([torch.zeros(1)] * 2, [1, 1]),
        ([torch.zeros(1, dtype=torch.uint8)] * 2, [2, 1]),
        ([torch.zeros(1, dtype=torch.uint8)] * 2, [1, -1]),
    ],
    ids=["parts", "sizes", "dtype", "own", "negative"],
)
def test_exchange_that_does_not_fit_is_refused_before_anything_is_sent(parts, sizes):
    member = LocalGroup(2, clock=SystemClock()).rank(0, Inline())

    with pytest.raises(LayoutMismatch):
        member.exchange(key(), parts, sizes)

    assert member.traffic.sent == 0


@every_way
def test_missing_ranks_are_named_and_nothing_is_filled_in(transport, way):
    """The one that never came, or in a ring the neighbour that waits for it."""

    def work(ranks: Collectives) -> MissingRanks | None:
        if ranks.rank == 1:
            return None
        with pytest.raises(MissingRanks, match="nothing is filled in") as refused:
            ranks.all_reduce(key(), values(ranks.rank, 1_003)).wait()
        return refused.value

    found = transport(3, way, work, timeout_seconds=0.8)

    named = [error.ranks if error else () for error in found]
    assert named == ([(2,), (), (1,)] if way == "ring" else [(1,), (), (1,)])


@pytest.mark.parametrize("codec", [None, WireCodec(Int8())], ids=["plain", "int8"])
def test_direct_exchange_names_all_who_are_missing(codec):
    def work(ranks: Collectives) -> tuple[int, ...]:
        if ranks.rank in (1, 2):
            return ()
        with pytest.raises(MissingRanks) as refused:
            ranks.all_reduce(key(), values(ranks.rank, 1_003), codec=codec).wait()
        return tuple(refused.value.ranks)

    found = threads(4, "direct", work, timeout_seconds=0.3)

    assert found == [(1, 2), (), (), (1, 2)]


def test_abort_reaches_whoever_waits_and_whoever_comes_later(transport):
    gone = GroupBroken("rank 1 left")

    def work(ranks: Collectives) -> list[str]:
        if ranks.rank == 1:
            return []
        begun = ranks.barrier(key(1, op="control"))
        ranks.abort(gone)
        later = ranks.barrier(key(2, op="control"))
        found = []
        for handle in (begun, later):
            with pytest.raises(GroupBroken) as refused:
                handle.wait()
            found.append(str(refused.value))
        return found

    assert transport(2, "ring", work) == [["rank 1 left"] * 2, []]


@pytest.mark.parametrize(
    ("shard", "out"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(6)[::2], torch.zeros(3)),
    ],
    ids=["length", "dtype", "shape", "strides"],
)
def test_tensor_that_does_not_fit_is_refused_before_anything_is_sent(shard, out):
    group = LocalGroup(1, clock=SystemClock())

    with pytest.raises(LayoutMismatch):
        group.rank(0, Inline()).all_gather(key(), shard, out)


def test_source_and_rank_outside_the_group_are_refused():
    group = LocalGroup(2, clock=SystemClock())

    with pytest.raises(ConfigError, match="source=2"):
        group.rank(0, Inline()).broadcast(key(), torch.zeros(1), source=2)
