"""Collectives by a codec: what the bytes say, on all ranks and transports alike."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import HashedNoise
from atoll.collectives import codecs, schedule
from atoll.collectives.base import Collectives, Label
from atoll.collectives.codecs import WireCodec
from atoll.collectives.exchange import Way
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.compiled import base as compiled_base
from atoll.errors import ConfigError, LayoutMismatch, ProtocolError
from atoll.layout import GROUP_ELEMENTS, Span
from tests.rank_groups import TRANSPORTS, equal, key, threads, values

SIZES = (1, 2, 3, 4, 5)
# None, one, fewer than ranks, short blocks; and two chunks or more of every part, the last short.
LENGTHS = (0, 1, 3, 1_003, 5 * GROUP_ELEMENTS + 1_007)
LONG = LENGTHS[-1]
INT8 = WireCodec(Int8(rounding="stochastic"), seed=7)
PARAMETERS = {"int8": WireCodec(Int8()), "bf16": WireCodec(Bf16())}

NEAREST = {"int8": lambda part: rounded(part), "bf16": lambda part: part.bfloat16().float()}

every_size = pytest.mark.parametrize("size", SIZES)
every_way = pytest.mark.parametrize("way", ["ring", "direct"])


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return TRANSPORTS[request.param]


# The reference: int8 and the order of adding, written out in numpy


def rounded(given: Tensor, draws: np.ndarray | None = None) -> Tensor:
    """What int8 leaves of the values of a part: 256 share a scale, the largest by 127."""
    room = np.zeros((-(-len(given) // 256), 256), np.float32)
    room.ravel()[: len(given)] = given.numpy()
    scales = np.abs(room).max(axis=1, keepdims=True) / np.float32(127)
    quotients = room / np.where(scales == 0, np.float32(1), scales)
    if draws is None:
        levels = np.rint(quotients)
    else:
        levels = np.floor(quotients + draws[: room.size].reshape(room.shape))
    found = np.clip(levels, -127, 127).astype(np.float32) * scales
    return torch.from_numpy(found.ravel()[: len(given)].copy())


def drawn(given: Tensor, *, sender: int, owner: int, stage: str = "reduce", step: int = 0):
    """The same with the noise of one sender's part."""
    noise = HashedNoise(7, step, f"{stage}/0/0/{sender}/{owner}")
    groups = range(-(-len(given) // GROUP_ELEMENTS))
    bits = [noise.bits16(group, GROUP_ELEMENTS) for group in groups] or [np.empty(0, np.uint16)]
    draws = np.concatenate(bits).astype(np.float32) / np.float32(65536)
    return rounded(given, draws)


@cache
def parts_of(rank: int, length: int, size: int) -> list[Tensor]:
    bounds = [k * length // size for k in range(size + 1)]
    return [values(rank, length)[bounds[k] : bounds[k + 1]] for k in range(size)]


@cache
def direct_sums(size: int, length: int, step: int = 0) -> list[Tensor]:
    """Each rank's part: everybody's values rounded once, the owner's too, added in order."""
    found = []
    for owner in range(size):
        ranks = [(owner + 1 + k) % size for k in range(size)]
        given = [
            drawn(parts_of(rank, length, size)[owner], sender=rank, owner=owner, step=step)
            for rank in ranks
        ]
        total, *rest = given
        for one in rest:
            total = total + one
        found.append(total)
    return found


@cache
def ring_sums(size: int, length: int, step: int = 0) -> list[Tensor]:
    """Each rank's part: the partial sum rounded before every hop, the owner's values added last."""
    found = []
    for owner in range(size):
        total = torch.zeros(len(parts_of(0, length, size)[owner]))
        for k in range(size - 1):
            rank = (owner + 1 + k) % size
            own = parts_of(rank, length, size)[owner]
            total = drawn(total + own if k else own, sender=rank, owner=owner, step=step)
        found.append(total + parts_of(owner, length, size)[owner])
    return found


def reducing(length: int, codec: WireCodec = INT8, **changes: Any) -> Callable[..., Tensor]:
    def work(ranks: Collectives) -> Tensor:
        own = values(ranks.rank, length)
        out = torch.full((len(schedule.cut(length, ranks.size)[ranks.rank]),), -7.0)
        ranks.reduce_scatter(key(**changes), own, out, codec=codec).wait()
        return out

    return work


# What comes out


@every_way
@every_size
def test_sum_is_rounded_once_directly_and_at_every_hop_of_a_ring(transport, way, size):
    def work(ranks: Collectives) -> list[Tensor]:
        return [reducing(length, step=k)(ranks) for k, length in enumerate(LENGTHS)]

    found = transport(size, way, work)

    summed = direct_sums if way == "direct" or size == 1 else ring_sums
    for step, length in enumerate(LENGTHS):
        assert equal([parts[step] for parts in found], summed(size, length, step))


def test_ring_adds_to_the_error_with_every_rank():
    """The control: the two ways are told apart, and the choice has its price."""
    length, size = 50_000, 5
    true = torch.stack([values(rank, length).double() for rank in range(size)]).sum(dim=0)

    def error(found: list[Tensor]) -> float:
        return float(torch.cat(found).double().sub_(true).norm())

    once, again = error(direct_sums(size, length)), error(ring_sums(size, length))

    assert again > 1.1 * once > 0


@every_way
def test_result_of_a_sum_may_lie_in_the_values(transport, way):
    def work(ranks: Collectives) -> Tensor:
        own = values(ranks.rank, LONG)
        out = schedule.cut(LONG, 3)[ranks.rank].of(own)
        ranks.reduce_scatter(key(), own, out, codec=INT8).wait()
        return out

    wanted = direct_sums(3, LONG) if way == "direct" else ring_sums(3, LONG)
    assert equal(transport(3, way, work), wanted)


@every_way
@every_size
def test_all_ranks_get_what_the_bytes_say_and_the_owner_keeps_its_own(transport, way, size):
    cases = [(codec, length) for codec in PARAMETERS.values() for length in LENGTHS]

    def work(ranks: Collectives) -> list[tuple[Tensor, Tensor]]:
        found = []
        for step, (codec, length) in enumerate(cases):
            shard = parts_of(0, length, size)[ranks.rank].clone()
            out = torch.full((length,), -7.0)
            ranks.all_gather(key(step, op="gather"), shard, out, codec=codec).wait()
            found.append((out, shard))
        return found

    found = transport(size, way, work)

    for step, (codec, length) in enumerate(cases):
        parts = parts_of(0, length, size)
        wanted = torch.cat([NEAREST[codec.name](one) for one in parts])
        assert equal([rank[step][0] for rank in found], [wanted] * size)
        assert equal([rank[step][1] for rank in found], parts)


def test_codecs_do_drop_something_of_these_numbers():
    """The control: else who computes with its own values would not be told apart."""
    assert not any(
        torch.equal(near(values(0, 1_003)), values(0, 1_003)) for near in NEAREST.values()
    )


@pytest.mark.parametrize("carried", ["grpc", "tcp"])
@pytest.mark.parametrize("size", [3, 4])
def test_ring_of_long_parts_does_not_stand_still_where_mailboxes_are_full(carried, size):
    length = size * 8 * GROUP_ELEMENTS + 1_007  # mailboxes hold a chunk each

    def work(ranks: Collectives) -> tuple[Tensor, Tensor]:
        shard = schedule.cut(length, size)[ranks.rank].of(values(0, length)).clone()
        whole = torch.zeros(length)
        ranks.all_gather(key(1), shard, whole, codec=PARAMETERS["int8"]).wait()
        return reducing(length)(ranks), whole

    found = TRANSPORTS[carried](size, "ring", work, timeout_seconds=10.0)

    assert equal([summed for summed, _ in found], ring_sums(size, length))
    gathered = torch.cat([rounded(part) for part in parts_of(0, length, size)])
    assert all(torch.equal(whole, gathered) for _, whole in found)


@every_way
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_rounds_the_sum_once_more_for_all(transport, way, size):
    def work(ranks: Collectives) -> Tensor:
        own = values(ranks.rank, LONG)
        ranks.all_reduce(key(), own, codec=INT8).wait()
        return own

    summed = direct_sums if way == "direct" or size == 1 else ring_sums
    wanted = [
        drawn(one, sender=k, owner=k, stage="gather") for k, one in enumerate(summed(size, LONG))
    ]
    assert equal(transport(size, way, work), [torch.cat(wanted)] * size)


@every_way
def test_size_of_chunks_changes_no_bit(way):
    small = threads(2, way, reducing(LONG))

    large = threads(2, way, reducing(LONG), chunk_bytes=1 << 20)

    assert equal(large, small)


@every_way
def test_many_chunks_pass_through_mailboxes_that_hold_one(way):
    """Who sends in another order than the next rank takes would fill its mailbox and wait."""
    length = 3 * 7 * GROUP_ELEMENTS + 5

    def work(ranks: Collectives) -> Tensor:
        own = torch.full((length,), float(ranks.rank + 1))
        ranks.all_reduce(key(), own, codec=INT8).wait()
        return own

    found = TRANSPORTS["grpc"](3, way, work, timeout_seconds=10.0)

    assert equal(found, [found[0]] * 3)
    assert float(found[0].sub_(6.0).abs().max()) < 0.2


# What is drawn


@pytest.mark.parametrize(
    ("codec", "changes"),
    [
        (INT8, {"step": 1}),
        (INT8, {"micro": 1}),
        (INT8, {"unit": 1}),
        (WireCodec(Int8(rounding="stochastic"), seed=8), {}),
    ],
    ids=["step", "micro-batch", "unit", "seed"],
)
def test_noise_is_another_for_every(codec, changes):
    first = threads(2, "direct", reducing(5_000))

    other = threads(2, "direct", reducing(5_000, codec, **changes))

    assert not torch.equal(first[0], other[0])


def test_noise_is_the_same_for_a_step_that_another_group_repeats():
    def repeated(group: int) -> Tensor:
        out = torch.zeros(5_000)
        ranks = LocalGroup(1, clock=SystemClock(), group=group).rank(0, Inline())
        ranks.reduce_scatter(key(group=group), values(0, 5_000), out, codec=INT8).wait()
        return out

    assert torch.equal(repeated(1), repeated(9))


def test_rounding_is_right_on_average():
    """The control is rounding to nearest, which is wrong by the same amount every time."""
    own = torch.full((256 * 40,), 0.3)
    own[::256] = 127.0  # a scale of 1: every 0.3 becomes 0 or 1

    def mean(codec: WireCodec) -> float:
        ranks, out, total = LocalGroup(1, clock=SystemClock()).rank(0, Inline()), own.clone(), 0.0
        for step in range(20):
            ranks.reduce_scatter(key(step), own.clone(), out, codec=codec).wait()
            total += float(out[out < 100].mean()) / 20
        return total

    draws = 20 * 255 * 40
    assert abs(mean(INT8) - 0.3) < 5 * (0.3 * 0.7 / draws) ** 0.5  # 5 standard errors
    assert mean(WireCodec(Int8())) == 0.0


@every_way
def test_loops_and_torch_give_one_result_and_leave_the_tensors_resizable(way, monkeypatch):
    """Memory that was lent to numpy could never be freed again, and gathered weights are freed."""
    whole, length = values(0, LONG), LONG

    def work(ranks: Collectives) -> tuple[list[Tensor], Tensor, Tensor]:
        own, out = values(ranks.rank, length), torch.zeros(length)
        part = torch.zeros(len(schedule.cut(length, 2)[ranks.rank]))
        shard = parts_of(0, length, 2)[ranks.rank].clone()
        ranks.reduce_scatter(key(1), own, part, codec=INT8).wait()
        ranks.all_gather(key(2), shard, out, codec=PARAMETERS["int8"]).wait()
        return [part, out.clone()], out, own

    plain = threads(2, way, work)
    monkeypatch.setattr(compiled_base.compiled, "ready", lambda _: True)
    monkeypatch.setattr(compiled_base.compiled, "ready_for_any", lambda: True)
    fast = threads(2, way, work)

    for (before, _, _), (after, out, own) in zip(plain, fast, strict=True):
        assert equal(after, before)
        out.untyped_storage().resize_(0)
        own.untyped_storage().resize_(0)
    assert not torch.equal(plain[0][0][1], whole)


# Residuals


def fed(way: Way, codec: WireCodec, steps: int, *, keeps: bool) -> tuple[Tensor, list[Tensor]]:
    """The sum over `steps` of the same gradients, reduced each time, and what each rank keeps."""
    length = 3_000

    def work(ranks: Collectives) -> tuple[Tensor, Tensor]:
        span = schedule.cut(length, ranks.size)[ranks.rank]
        total, out = torch.zeros(len(span), dtype=torch.float64), torch.zeros(len(span))
        residual = torch.zeros(length, dtype=torch.bfloat16)
        for step in range(steps):
            given = residual if keeps else None
            own = values(ranks.rank, length)
            ranks.reduce_scatter(key(step), own, out, codec=codec, residual=given).wait()
            total += out
        return total, residual

    found = threads(3, way, work)
    return torch.cat([total for total, _ in found]), [residual for _, residual in found]


@every_way
def test_what_rounding_drops_is_sent_later_where_residuals_are_kept(way):
    codec, steps = WireCodec(Int8()), 24
    true = sum(values(rank, 3_000).double() for rank in range(3)) * steps

    lost, _ = fed(way, codec, steps, keeps=False)
    kept, residuals = fed(way, codec, steps, keeps=True)

    assert float((kept - true).norm()) < 0.2 * float((lost - true).norm())
    own = [schedule.cut(3_000, 3)[rank].of(one) for rank, one in enumerate(residuals)]
    # In a ring a rank never sends its own part; directly it rounds that, too.
    assert [bool(one.any()) for one in own] == [way == "direct"] * 3


@pytest.mark.parametrize(
    ("residual", "codec"),
    [
        (torch.zeros(10, dtype=torch.bfloat16), None),
        (torch.zeros(10), INT8),
        (torch.zeros(9, dtype=torch.bfloat16), INT8),
    ],
    ids=["no codec", "dtype", "length"],
)
def test_residual_that_does_not_fit_is_refused(residual, codec):
    ranks = LocalGroup(1, clock=SystemClock()).rank(0, Inline())

    with pytest.raises(LayoutMismatch, match="residual has"):
        ranks.reduce_scatter(
            key(), torch.zeros(10), torch.zeros(10), codec=codec, residual=residual
        )


# What travels, and what is refused


@pytest.mark.parametrize(
    ("codec", "share"), [(INT8, 0.254), (PARAMETERS["int8"], 0.254), (PARAMETERS["bf16"], 0.5)]
)
def test_messages_are_so_much_shorter(codec, share):
    """Chunks of whole groups; nothing but their bytes."""
    group, clock = LocalGroup(2, clock=SystemClock()), SystemClock()
    ranks = group.rank(0, Inline(), timeout_seconds=0.0, chunk_bytes=1)
    shard = values(0, LONG)[: LONG // 2]

    handle = ranks.all_gather(key(), shard, torch.zeros(LONG), codec=codec)
    with pytest.raises(Exception, match="nothing came"):
        handle.wait()

    spans = list(schedule.chunks(Span(0, LONG // 2), GROUP_ELEMENTS))
    found = [
        group.mailboxes[1].take(
            Label(key(), 0, span), 0, nbytes=codec.nbytes(len(span)), until=clock.now()
        )
        for span in spans
    ]
    assert len(spans) > 1
    assert sum(map(len, found)) <= share * 4 * len(shard)


@every_way
@pytest.mark.parametrize("nbytes", [0, 1, GROUP_ELEMENTS, 4 * GROUP_ELEMENTS])
def test_message_of_another_size_is_refused_and_its_place_stays(way, nbytes):
    """Also one that carries the values as they are, from a rank that was given no codec."""
    group = LocalGroup(2, clock=SystemClock())
    ranks = group.rank(0, Inline(), way=way, timeout_seconds=1.0, chunk_bytes=1)
    out, length = torch.full((LONG,), -7.0), LONG
    theirs = schedule.cut(length, 2)[1]
    first = Span(theirs.start, theirs.start + GROUP_ELEMENTS)
    group.mailboxes[0].deliver(Label(key(), 0, first), 1, bytes(nbytes))
    shard = parts_of(0, length, 2)[0]

    with pytest.raises(ProtocolError, match=f"sent {nbytes} bytes"):
        ranks.all_gather(key(), shard, out, codec=INT8).wait()

    assert bool((theirs.of(out) == -7.0).all())
    assert torch.equal(shard, parts_of(0, length, 2)[0])


def test_bytes_that_say_what_is_not_finite_do_not_pass_for_zeros():
    """A scale that is no number makes its block no numbers; the others stay what they are."""
    group = LocalGroup(2, clock=SystemClock())
    payload = INT8.part("reduce", step=0, micro=0, unit=0, sender=1, owner=0).encode(
        parts_of(1, 2_000, 2)[0], Span(0, 1_000)
    )
    payload[:4] = 0xFF
    label = Label(key(), 0, Span(0, 1_000))
    group.mailboxes[0].deliver(label, 1, bytes(payload.numpy()))
    out = torch.zeros(1_000)

    group.rank(0, Inline(), way="direct").reduce_scatter(
        key(), values(0, 2_000), out, codec=INT8
    ).wait()

    assert bool(out[:256].isnan().all())
    assert torch.equal(out[256:], direct_sums(2, 2_000)[0][256:])


@pytest.mark.parametrize("start", [0, 500, 999])
def test_shard_that_lies_in_the_result_is_refused(start):
    ranks = LocalGroup(2, clock=SystemClock()).rank(0, Inline())
    room = torch.ones(1_500)
    shard = room[start : start + 500]

    with pytest.raises(LayoutMismatch, match="of its own memory"):
        ranks.all_gather(key(), shard, room[:1_000], codec=INT8)

    assert bool((room == 1).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8], ids=str)
def test_values_that_are_not_fp32_are_refused(dtype):
    ranks = LocalGroup(1, clock=SystemClock()).rank(0, Inline())
    own = torch.zeros(10, dtype=dtype)

    for begin in (
        lambda: ranks.all_gather(key(), own.clone(), own, codec=INT8),
        lambda: ranks.reduce_scatter(key(), own.clone(), own, codec=INT8),
        lambda: ranks.all_reduce(key(), own, codec=INT8),
    ):
        with pytest.raises(LayoutMismatch, match="takes fp32 values"):
            begin()


def test_codecs_are_known_by_the_names_of_the_settings():
    assert codecs.of_gradients("fp32", seed=1) is None
    assert codecs.of_gradients("int8", seed=7) == INT8
    assert {name: codecs.of_parameters(name) for name in PARAMETERS} == PARAMETERS
    assert codecs.of_parameters("fp32") is None
    with pytest.raises(ConfigError, match="gradients='bf16'"):
        codecs.of_gradients("bf16", seed=1)
    with pytest.raises(ConfigError, match="parameters='int4'"):
        codecs.of_parameters("int4")
