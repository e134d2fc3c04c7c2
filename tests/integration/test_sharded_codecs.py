"""Weights and gradients that travel in fewer bytes: what is computed with, and what is kept."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import codecs
from atoll.collectives.base import Collectives, Label
from atoll.collectives.local import LocalPort
from atoll.errors import ConfigError
from atoll.models import gpt, registry
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step
from tests import sharded
from tests.sharded import Rank, Training

SHORT = Training(steps=2)
# Blocks of 49,280 elements: large enough that scales are few.
WIDE = {"block": 8, "vocab": 64, "layers": 2, "heads": 2, "width": 64}
LARGE = Training(model={"architecture": "gpt", **WIDE}, steps=1, micro_batches=1)
INT8 = codecs.of_gradients("int8", seed=3)
lossy = pytest.mark.parametrize("name", ["bf16", "int8"])


def losses(ranks: list[Rank]) -> list[float]:
    return [made.loss_sum / made.tokens for made in ranks[0].made]


# Parameters


def gathered(ranks: Collectives, clock: Clock, name: str) -> tuple[Tensor, Tensor]:
    """What a rank computes with, flat, and its own shard after that."""
    codec = codecs.of_parameters(name)
    steps = sharded.opened(SHORT, ranks, clock, parameter_codec=codec)
    engine, found = steps.engine, torch.zeros(SHORT.units.layout.size)
    views = SHORT.units.layout.views(found)

    def look(model: Any, rows: Tensor) -> tuple[float, int]:
        for unit in SHORT.units.units:
            module = model.get_submodule(unit.module)

            def seen(*_: Any, unit: Any = unit) -> None:
                for tensor in unit.layout.tensors:
                    views[tensor.name].copy_(model.get_parameter(tensor.name).detach())

            hooks.append(module.register_forward_pre_hook(seen))
        return gpt.loss_sum(model, rows)

    hooks: list[Any] = []
    steps.evaluate(0, [(SHORT.rows(1), True)], look)
    for hook in hooks:
        hook.remove()
    return found, sharded.whole(SHORT, [engine.shard])


@lossy
def test_all_ranks_compute_with_the_bytes_sent_and_the_master_keeps_its_own(name):
    found = sharded.threads(3, lambda ranks, clock: gathered(ranks, clock, name))

    first = found[0][0]
    assert all(torch.equal(computed, first) for computed, _ in found)
    master = torch.cat([v.reshape(-1) for v in SHORT.initial().values()])
    away = (first - master).abs()
    assert 0 < away.max() <= master.abs().max() / 100
    for _, kept in found:
        is_own = ~kept.isnan()
        assert torch.equal(kept[is_own], master[is_own])
        assert bool(away[is_own].any())  # the owner, too, computes with what it sent


def test_bf16_parameters_give_the_loss_of_rounded_weights():
    codec = codecs.of_parameters("bf16")
    rows = SHORT.rows(9)

    def work(ranks: Collectives, clock: Clock) -> float:
        steps = sharded.opened(SHORT, ranks, clock, parameter_codec=codec)
        return steps.evaluate(0, [(rows, True)], gpt.loss_sum)[0]

    model = registry.build(SHORT.model)
    with torch.no_grad():
        for name, values in SHORT.initial().items():
            model.get_parameter(name).copy_(values.bfloat16().float())
    wanted = gpt.loss_sum(model, rows)[0]
    assert sharded.threads(2, work) == [wanted, wanted]


# Gradients


@pytest.mark.parametrize("residuals", [False, True])
def test_int8_gradients_train_about_as_fp32_ones(residuals):
    training = Training(steps=8)
    options: dict[str, Any] = {"gradient_codec": INT8, "residuals": residuals}

    found = sharded.threads(2, sharded.trained(training, **options), way="direct")
    wanted = sharded.threads(2, sharded.trained(training), way="direct")

    assert losses(found) != losses(wanted)
    assert losses(found) == pytest.approx(losses(wanted), rel=5e-3)


def test_residuals_carry_what_was_dropped():
    """Over several micro-batches the sum loses less than without them."""
    many = Training(steps=1, micro_batches=6, batch=12, clip=0.0)

    exact = _sums(many)

    def away(**options: Any) -> float:
        def sums(ranks: Collectives, clock: Clock) -> Shard:
            engine = sharded.opened(many, ranks, clock, **options).engine
            for micro, (rows, tokens) in enumerate(sharded.own(many, 1, ranks)):
                engine.begin(1, micro, tokens=tokens)
                gpt.loss(engine.model, rows).backward()
                engine.finish()
            return engine.shard

        found = sharded.whole(many, sharded.threads(2, sums, way="direct"), "sums")
        return float((found - exact).norm() / exact.norm())

    assert away() < 1e-6
    assert away(gradient_codec=INT8, residuals=True) < 0.7 * away(gradient_codec=INT8)


def _sums(training: Training) -> Tensor:
    """The exact gradient sum of a step, by one process in float64."""
    model = registry.build(training.model).double()
    with torch.no_grad():
        for name, values in training.initial().items():
            model.get_parameter(name).copy_(values)
    rows = training.rows(1)
    (gpt.loss(model, rows) * (len(rows) * training.tokens)).backward()
    flat = torch.zeros(training.units.layout.size, dtype=torch.float64)
    for name, view in training.units.layout.views(flat).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        view.copy_(gradient)
    return flat


def test_cost_of_residuals_is_told():
    def work(ranks: Collectives, clock: Clock) -> int:
        steps = sharded.opened(SHORT, ranks, clock, gradient_codec=INT8, residuals=True)
        return steps.engine.residual_nbytes

    assert sharded.threads(2, work) == [2 * SHORT.units.layout.size] * 2


def test_abandoned_step_leaves_no_residual():
    """The step after it is that of ranks which begin there."""
    options: dict[str, Any] = {"gradient_codec": INT8, "residuals": True}

    def sums(steps: Step, ranks: Collectives) -> Tensor:
        steps.train(2, sharded.own(SHORT, 2, ranks), gpt.loss, lr=1e-3)
        return sharded.whole(SHORT, [steps.engine.shard], "first_moments").nan_to_num()

    def begins(ranks: Collectives, clock: Clock) -> Tensor:
        return sums(sharded.opened(SHORT, ranks, clock, **options), ranks)

    def goes_on(ranks: Collectives, clock: Clock, *, abandons: bool) -> Tensor:
        steps = sharded.opened(SHORT, ranks, clock, **options)
        rows, tokens = sharded.own(SHORT, 1, ranks)[0]
        steps.begin(1)
        steps.begin_micro(tokens)
        gpt.loss(steps.engine.model, rows).backward()
        steps.engine.finish()
        if abandons:
            steps.abandon()
        return sums(steps, ranks)

    wanted = sharded.threads(2, begins, way="direct")
    found = sharded.threads(2, partial(goes_on, abandons=True), way="direct")
    other = sharded.threads(2, partial(goes_on, abandons=False), way="direct")

    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(other, wanted, strict=True))


# Bytes


def test_bytes_of_a_step_with_codecs_are_a_quarter_and_four_tenths(monkeypatch):
    sent: Counter[str] = Counter()
    plain: Callable[..., None] = LocalPort.send

    def counted(self: LocalPort, to: int, label: Label, values: Tensor) -> None:
        sent[label.key.op] += values.nbytes
        plain(self, to, label, values)

    monkeypatch.setattr(LocalPort, "send", counted)

    def nbytes(**options: Any) -> int:
        sent.clear()
        sharded.threads(2, sharded.trained(LARGE, **options), way="direct", chunk_bytes=1 << 20)
        return sum(sent.values())

    whole = nbytes()
    # The root and the last block are gathered once, the other block twice.
    elements = LARGE.units.layout.size
    first = LARGE.units.units[1].size
    assert whole == pytest.approx(4 * (2 * elements + first), rel=1e-3)
    int8, bf16 = codecs.of_parameters("int8"), codecs.of_parameters("bf16")
    assert nbytes(gradient_codec=INT8, parameter_codec=int8) < 0.27 * whole
    assert nbytes(gradient_codec=INT8, parameter_codec=bf16) < 0.42 * whole


# Refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"parameter_codec": codecs.of_parameters("int8"), "computes": torch.bfloat16},
            "'int8' and are computed in torch.bfloat16",
        ),
        ({"residuals": True}, "there is none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        sharded.threads(1, lambda ranks, clock: sharded.opened(SHORT, ranks, clock, **options))


def test_codec_takes_fp32_alone():
    wide = Training(dtype=torch.float64)

    with pytest.raises(ConfigError, match=r"'int8' takes torch\.float32"):
        sharded.threads(
            1, lambda ranks, clock: sharded.opened(wide, ranks, clock, gradient_codec=INT8)
        )
