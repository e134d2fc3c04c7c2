"""Ranks that train together end where one process with the whole batch ends."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives.base import Handle, Key
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.step import Step
from tests import rank_groups, sharded
from tests.sharded import Rank, Training

# Whole model and worst tensor: what rounding alone may make of 20 steps. Adam turns the rounding
# of tiny gradients into steps, so a tensor is allowed ten times the whole.
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-12)}
every_size = pytest.mark.parametrize("size", [2, 3, 4])

# 7 rows in 2 micro-batches: uneven for every size, and with 4 ranks one has a stand-in.
FP32 = Training()
FP64 = Training(dtype=torch.float64)


@cache
def reference(training: Training) -> tuple[dict[str, Tensor], list[float], list[float]]:
    return sharded.alone(training)


@cache
def in_threads(training: Training, size: int) -> list[Rank]:
    return sharded.threads(size, sharded.trained(training))


def is_equal(training: Training, ranks: list[Rank]) -> bool:
    wanted, _, _ = reference(training)
    flat = sharded.whole(training, [rank.shard for rank in ranks])
    found = sharded.differences(training, flat, wanted)
    return all(a <= b for a, b in zip(found, BOUNDS[training.dtype], strict=True))


@every_size
@pytest.mark.parametrize("training", [FP32, FP64], ids=["fp32", "float64"])
def test_ranks_end_where_one_process_ends(training, size):
    assert is_equal(training, in_threads(training, size))


@every_size
def test_losses_and_norms_are_those_of_one_process(size):
    _, losses, norms = reference(FP64)

    made = in_threads(FP64, size)[0].made

    assert [m.loss_sum / m.tokens for m in made] == pytest.approx(losses, rel=1e-12)
    assert [m.norm for m in made] == pytest.approx(norms, rel=1e-12)
    assert {m.tokens for m in made} == {7 * 8}


def test_clipping_is_at_work():
    """The control of all that says something about clipping."""
    _, _, norms = reference(FP64)

    assert min(norms) < 2 * FP64.clip and max(norms) > FP64.clip


@every_size
def test_all_ranks_are_told_the_same(size):
    first, *others = [
        [(m.step, m.loss_sum, m.tokens, m.norm) for m in rank.made]
        for rank in in_threads(FP32, size)
    ]

    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 4])
def test_threads_and_fibers_give_the_same_bits(size):
    short = Training(steps=4)

    here = sharded.threads(size, sharded.trained(short))
    there = sharded.fibers(size, sharded.trained(short))

    for section in ("weights", "first_moments", "second_moments"):
        a, b = (sharded.whole(short, [r.shard for r in ranks], section) for ranks in (here, there))
        assert torch.equal(a, b)


def test_servers_give_the_bits_of_threads():
    short = Training(steps=2)
    work = sharded.trained(short)

    found = rank_groups.over_grpc(3, "ring", lambda ranks: work(ranks, SystemClock()))
    wanted = sharded.threads(3, work)

    a, b = (sharded.whole(short, [rank.shard for rank in ranks]) for ranks in (found, wanted))
    assert torch.equal(a, b)


def test_ring_and_direct_exchange_give_the_same_bits():
    short = Training(steps=3)

    a, b = (
        sharded.whole(short, [r.shard for r in sharded.threads(3, sharded.trained(short), way=way)])
        for way in ("ring", "direct")
    )

    assert torch.equal(a, b)


def test_untied_model_without_clipping_in_one_micro_batch():
    plain = Training(
        model={**sharded.MODEL, "tied": False},
        steps=5,
        clip=0.0,
        micro_batches=1,
        dtype=torch.float64,
    )

    assert is_equal(plain, sharded.threads(3, sharded.trained(plain)))


def test_more_ranks_than_rows():
    few = Training(batch=2, steps=3, dtype=torch.float64)

    assert is_equal(few, sharded.threads(4, sharded.trained(few)))


# Controls: what must not pass


class Averaging:
    """Collectives that average where they should add."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce_scatter(self, key: Key, values: Tensor, out: Tensor, **options: Any) -> Handle:
        handle = self._inner.reduce_scatter(key, values, out, **options)
        size = self._inner.size

        class Divided:
            def wait(self) -> None:
                handle.wait()
                out.div_(size)

        return Divided()


class Averaged(Engine):
    def __init__(self, model: Any, shard: Any, ranks: Any, **options: Any) -> None:
        super().__init__(model, shard, Averaging(ranks), **options)


class ForgetsAMicroBatch(Engine):
    def begin(self, step: int, micro: int, *, tokens: int) -> None:
        super().begin(step, micro, tokens=tokens)
        self._reductions.summed.clear()


class CountsRanksAlike(Engine):
    """Means of ranks with unequal rows, all with the weight of one."""

    def begin(self, step: int, micro: int, *, tokens: int) -> None:
        super().begin(step, micro, tokens=8 if tokens else 0)


class CountsStandIns(Engine):
    def begin(self, step: int, micro: int, *, tokens: int) -> None:
        super().begin(step, micro, tokens=tokens or 8)


class ClipsBeforeDividing(Step):
    def _mean_and_norm(self, tokens: int) -> float:
        norm_of_the_sum = super()._mean_and_norm(1)
        for unit in range(len(self.engine.shard.owned)):
            self.engine.shard.of(unit, "sums").div_(float(tokens))
        return norm_of_the_sum


class OwnNorm(Step):
    """Clips by the norm of what a rank owns."""

    def _all_reduce(self, unit: int, values: Tensor) -> None:
        if values.numel() == 1:
            return
        super()._all_reduce(unit, values)


SHORT = Training(steps=6)


@pytest.mark.parametrize(
    ("size", "mutant"),
    [
        (2, {"engine": Averaged}),
        (2, {"engine": ForgetsAMicroBatch}),
        (2, {"engine": CountsRanksAlike}),
        (4, {"engine": CountsStandIns}),
        (2, {"step": ClipsBeforeDividing}),
        (2, {"step": OwnNorm}),
    ],
    ids=lambda value: (
        next(iter(value.values())).__name__ if isinstance(value, dict) else str(value)
    ),
)
def test_mutant_does_not_end_where_one_process_ends(size, mutant):
    wrong = Training(steps=SHORT.steps, **mutant)
    wanted, _, _ = reference(SHORT)

    ranks = sharded.threads(size, sharded.trained(wrong))

    away, _ = sharded.differences(wrong, sharded.whole(wrong, [r.shard for r in ranks]), wanted)
    assert away > 10 * BOUNDS[torch.float32][0]


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_mutants_change_is_right_without_them(size):
    assert is_equal(SHORT, in_threads(SHORT, size))
