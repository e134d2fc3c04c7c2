"""1-bit Adam: what it computes without rounding, what it costs, and what signs do to the loss."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives.base import Collectives, Label
from atoll.collectives.local import LocalPort
from atoll.data.registry import open_dataset
from atoll.errors import EmptySum
from atoll.models import gpt, registry
from atoll.strategies.sharded import onebit
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.shard import SAVED, Shard
from atoll.strategies.sharded.step import Step
from tests import sharded
from tests.sharded import RULE, Training

WARMUP = 4
EXACT = Training(
    steps=10, clip=0.0, dtype=torch.float64, step=partial(Step, onebit_warmup_steps=WARMUP)
)


@pytest.fixture
def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onebit, "CODEC", None)
    monkeypatch.setattr(onebit, "FLOOR", 0.0)


def frozen_variance(training: Training) -> dict[str, Tensor]:
    """One process: AdamW for the warm-up, then the variance it had."""
    warm = Training(steps=WARMUP, clip=0.0, dtype=training.dtype)
    model = registry.build(training.model).to(training.dtype)
    with torch.no_grad():
        for name, values in training.initial().items():
            model.get_parameter(name).copy_(values)
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in range(1, training.steps + 1):
        model.zero_grad()
        gpt.loss(model, warm.rows(step)).backward()
        lr = training.rate(step)
        with torch.no_grad():
            for name, p in named.items():
                assert p.grad is not None
                decay = RULE.weight_decay if p.dim() >= 2 else 0.0
                first[name] = 0.9 * first[name] + 0.1 * p.grad
                if step <= WARMUP:
                    second[name] = 0.95 * second[name] + 0.05 * p.grad**2
                root = (second[name] / (1 - 0.95 ** min(step, WARMUP))).sqrt()
                p.mul_(1 - lr * decay)
                p.sub_(lr / (1 - 0.9**step) * first[name] / (root + 1e-8))
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.usefixtures("without_rounding")
@pytest.mark.parametrize("size", [2, 3])
def test_without_rounding_it_is_adam_with_the_variance_of_the_warm_up(size):
    ranks = sharded.threads(size, sharded.trained(EXACT), way="direct")

    flat = sharded.whole(EXACT, [rank.shard for rank in ranks])
    assert sharded.differences(EXACT, flat, frozen_variance(EXACT))[1] < 1e-12
    # The control: plain AdamW ends elsewhere.
    plain = Training(steps=10, clip=0.0, dtype=torch.float64)
    assert sharded.differences(EXACT, flat, sharded.alone(plain)[0])[0] > 1e-5


@pytest.mark.usefixtures("without_rounding")
def test_group_of_another_size_goes_on_with_the_momentum_of_the_owners():
    half = WARMUP + 2

    def first(ranks: Collectives, clock: Clock) -> Shard:
        steps = sharded.opened(EXACT, ranks, clock)
        return went(steps, ranks, 1, half)

    def second(ranks: Collectives, clock: Clock) -> Shard:
        steps = sharded.opened(EXACT, ranks, clock)
        for section in SAVED:
            steps.engine.shard.fill(section, 0, sharded.whole(EXACT, before, section))
        return went(steps, ranks, half + 1, EXACT.steps)

    def went(steps: Step, ranks: Collectives, start: int, stop: int) -> Shard:
        for step in range(start, stop + 1):
            rows = sharded.own(EXACT, step, ranks)
            steps.train(step, rows, gpt.loss, lr=EXACT.rate(step))
        return steps.engine.shard

    before = sharded.threads(2, first, way="direct")
    after = sharded.threads(3, second, way="direct")

    flat = sharded.whole(EXACT, after)
    assert sharded.differences(EXACT, flat, frozen_variance(EXACT))[1] < 1e-12


# Signs


class Letters(Training):
    """Rows with something to learn."""

    def rows(self, step: int) -> Tensor:
        data = {"kind": "synthetic", "seed": 1, "rows": 10_000, "held_out_rows": 1}
        found = open_dataset({**data, "block": self.tokens, "vocab": int(self.model["vocab"])})
        rows = range(step * self.batch, (step + 1) * self.batch)
        return torch.stack([torch.as_tensor(found.row(row)) for row in rows])


SIZE = {"vocab": 32, "block": 16, "layers": 2, "heads": 2, "width": 32}
LEARNS: dict[str, Any] = {
    **{"model": {"architecture": "gpt", **SIZE}, "steps": 80},
    **{"batch": 8, "micro_batches": 1, "clip": 1.0},
}


def end(training: Training) -> float:
    """The mean loss of the last ten steps."""
    ranks = sharded.threads(2, sharded.trained(training), way="direct", chunk_bytes=1 << 20)
    last = ranks[0].made[-10:]
    return float(sum(made.loss_sum for made in last) / sum(made.tokens for made in last))


class OfGradients(onebit.Momenta):
    """Signs of gradients, without momentum."""

    def begin(self) -> None:
        for momentum in self._own:
            momentum.zero_()


class OfOneRank(onebit.Momenta):
    """Loses what the other ranks computed."""

    def add(self, unit: int, gradient: Tensor) -> None:
        if self._shard.rank == 0:
            super().add(unit, gradient)


def test_loss_of_signs_is_within_five_percent_of_adamw(monkeypatch):
    signs = Letters(**LEARNS, step=partial(Step, onebit_warmup_steps=16))
    bar = 1.05 * end(Letters(**LEARNS))

    assert end(signs) < bar
    for mutant in (OfGradients, OfOneRank):
        monkeypatch.setattr("atoll.strategies.sharded.step.Momenta", mutant)
        assert end(signs) > bar


class Forgetful(onebit.Momenta):
    """Signs without error feedback."""

    def begin(self) -> None:
        super().begin()
        for residual in self._residuals:
            residual.zero_()


def test_what_signs_drop_is_made_up_for_later():
    """The same gradient again and again: all that was sent comes close to all that there was.

    What a residual holds is bounded, so the share that is missing falls with the steps; without it
    stays what signs of normal numbers drop, sqrt(1 - 2/pi) or 0.6 of them.
    """
    training = Training(steps=1)
    rule = AdamW(beta1=0.0)
    generator = torch.Generator().manual_seed(5)
    gradient = [torch.randn(unit.size, generator=generator) for unit in training.units.units]

    def away(kind: type[onebit.Momenta]) -> float:
        def work(ranks: Collectives, clock: Clock) -> Shard:
            shard = Shard(training.units, rank=ranks.rank, size=ranks.size)
            momenta = kind(shard, rule)
            for step in range(1, 31):
                momenta.begin()
                for unit, values in enumerate(gradient):
                    momenta.add(unit, values.clone())
                momenta.exchange(ranks, group=1, step=step, tokens=1)
                for unit in range(len(gradient)):
                    shard.of(unit, "weights").add_(shard.of(unit, "sums"))
            return shard

        sent = sharded.whole(training, sharded.threads(2, work, way="direct"))
        wanted = 2 * 30 * torch.cat(gradient)
        return float((sent - wanted).norm() / wanted.norm())

    assert away(onebit.Momenta) < 0.2 < 0.5 < away(Forgetful)


def test_gradient_bytes_are_twenty_times_fewer_and_the_cost_is_told(monkeypatch):
    sent: Counter[tuple[int, str]] = Counter()
    plain: Callable[..., None] = LocalPort.send

    def counted(self: LocalPort, to: int, label: Label, values: Tensor) -> None:
        sent[label.key.step, label.key.op] += values.nbytes
        plain(self, to, label, values)

    monkeypatch.setattr(LocalPort, "send", counted)
    training = Letters(
        **{**LEARNS, "steps": 2, "micro_batches": 2}, step=partial(Step, onebit_warmup_steps=1)
    )
    costs = []

    def work(ranks: Collectives, clock: Clock) -> None:
        steps = sharded.opened(training, ranks, clock)
        for step in (1, 2):
            steps.train(step, sharded.own(training, step, ranks), gpt.loss, lr=1e-3)
        costs.append(onebit.Momenta(steps.engine.shard, RULE).nbytes)

    sharded.threads(2, work, way="direct")

    assert sent[1, "reduce"] > 2 * 20 * sent[2, "reduce"] > 0  # and once for both micro-batches
    assert costs == [6 * training.units.layout.size] * 2


def every_other(*, refused: bool) -> Callable[[Collectives, Clock], Any]:
    """The warm-up, then steps 6, 8 and 10; if `refused`, in between some without any rows."""

    def work(ranks: Collectives, clock: Clock) -> sharded.Rank:
        steps = sharded.opened(EXACT, ranks, clock)
        made = []
        for step in (*range(1, WARMUP + 1), 6, 8, 10):
            if refused and step > WARMUP:
                nothing = [(rows, 0) for rows, _ in sharded.own(EXACT, step - 1, ranks)]
                with pytest.raises(EmptySum, match="no rank has rows of step"):
                    steps.train(step - 1, nothing, gpt.loss, lr=EXACT.rate(step))
            rows = sharded.own(EXACT, step, ranks)
            made.append(steps.train(step, rows, gpt.loss, lr=EXACT.rate(step)))
        return sharded.Rank(steps.engine.shard, made)

    return work


def test_step_without_rows_leaves_the_momenta_as_they_were(without_rounding: None) -> None:
    calm = sharded.threads(2, every_other(refused=False))
    tried = sharded.threads(2, every_other(refused=True))

    for section in SAVED:
        found = [sharded.whole(EXACT, [r.shard for r in ranks], section) for ranks in (calm, tried)]
        assert torch.equal(*found)
