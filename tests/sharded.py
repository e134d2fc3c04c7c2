"""A small sharded training in one process, and the same training by one process alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.clock import Clock, SystemClock
from atoll.collectives.base import Collectives
from atoll.collectives.exchange import Way
from atoll.models import gpt, init, registry
from atoll.strategies.sharded import micro_batches
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Section, Shard
from atoll.strategies.sharded.step import Made, Step
from atoll.strategies.sharded.units import Units
from tests import rank_groups

MODEL: dict[str, Any] = {
    "architecture": "gpt",
    **{"vocab": 40, "block": 8, "layers": 3, "heads": 2, "width": 16, "tied": True},
}
CHUNK_BYTES = 4_096  # a part of a unit is several
RULE = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True, eq=False)
class Training:
    """What is trained; known by its identity, so that what it comes to can be kept."""

    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    steps: int = 20
    batch: int = 7
    micro_batches: int = 2
    clip: float = 0.5
    dtype: torch.dtype = torch.float32
    hollow: Callable[[Mapping[str, Any]], nn.Module] = registry.hollow
    engine: Callable[..., Engine] = Engine
    step: Callable[..., Step] = Step

    @property
    def units(self) -> Units:
        return Units.of_model(registry.layout(self.model))

    @property
    def tokens(self) -> int:
        """Of a row."""
        return int(self.model["block"])

    def rows(self, step: int) -> Tensor:
        """The global rows of a step."""
        generator = torch.Generator().manual_seed(1_000 + step)
        shape = (self.batch, self.tokens + 1)
        return torch.randint(0, int(self.model["vocab"]), shape, generator=generator)

    def rate(self, step: int) -> float:
        return 2e-3 * min(1.0, step / 5)

    def initial(self) -> dict[str, Tensor]:
        return {n: v.to(self.dtype) for n, v in init.initial_weights(self.units.layout, seed=1)}


@dataclass(frozen=True)
class Rank:
    """What a rank ends with."""

    shard: Shard
    made: Sequence[Made]


def filled(training: Training, *, rank: int, size: int, **options: Any) -> Shard:
    """A rank's shard of the initial weights."""
    shard = Shard(training.units, rank=rank, size=size, dtype=training.dtype, **options)
    offsets = {t.name: t.offset for t in training.units.layout.tensors}
    for name, values in init.initial_weights(training.units.layout, seed=1):
        shard.fill("weights", offsets[name], values.reshape(-1).to(training.dtype))
    return shard


def opened(
    training: Training,
    ranks: Collectives,
    clock: Clock,
    *,
    group: int = 1,
    directory: Path | None = None,
    **options: Any,
) -> Step:
    """A rank that is ready for its first step; with a `directory` its shard is on the disk."""
    place: dict[str, Any] = {"offload": "disk", "directory": directory} if directory else {}
    shard = filled(training, rank=ranks.rank, size=ranks.size, **place)
    model = training.hollow(training.model)
    engine = training.engine(model, shard, ranks, group=group, clock=clock, **options)
    return training.step(engine, RULE, clip=training.clip)


def own(training: Training, step: int, ranks: Collectives) -> list[tuple[Tensor, int]]:
    """A rank's micro-batches of a step with their tokens."""
    rows, count = training.rows(step), training.micro_batches
    cut = micro_batches.of(training.batch, rank=ranks.rank, size=ranks.size, count=count)
    return [(rows[m.rows.start : m.rows.stop], m.num_rows * training.tokens) for m in cut]


def trained(training: Training, **options: Any) -> Callable[[Collectives, Clock], Rank]:
    """The work of a rank: all steps."""

    def work(ranks: Collectives, clock: Clock) -> Rank:
        steps = opened(training, ranks, clock, **options)
        made = [
            steps.train(step, own(training, step, ranks), gpt.loss, lr=training.rate(step))
            for step in range(1, training.steps + 1)
        ]
        return Rank(steps.engine.shard, made)

    return work


Work = Callable[[Collectives, Clock], Any]


def threads(
    size: int,
    work: Work,
    *,
    way: Way = "ring",
    chunk_bytes: int = CHUNK_BYTES,
    timeout_seconds: float = 30.0,
) -> list[Any]:
    """What each rank's work returned, each rank a thread with another for its collectives."""
    options: dict[str, Any] = {"chunk_bytes": chunk_bytes, "timeout_seconds": timeout_seconds}
    return rank_groups.threads(size, way, _clocked(work), **options)


def fibers(
    size: int,
    work: Work,
    *,
    way: Way = "ring",
    chunk_bytes: int = CHUNK_BYTES,
    timeout_seconds: float = 30.0,
) -> list[Any]:
    """The same in fibers on a virtual clock, without a thread beside them."""
    options: dict[str, Any] = {"chunk_bytes": chunk_bytes, "timeout_seconds": timeout_seconds}
    return rank_groups.fibers(size, way, _clocked(work), **options)


def _clocked(work: Work) -> Callable[[Collectives], Any]:
    return lambda ranks: work(ranks, SystemClock())


def whole(training: Training, shards: Sequence[Shard], section: Section = "weights") -> Tensor:
    """A section of all ranks, flat, in the layout's order."""
    flat = torch.full((training.units.layout.size,), torch.nan, dtype=training.dtype)
    for shard in shards:
        for unit, span in enumerate(shard.owned):
            span.of(flat).copy_(shard.of(unit, section))
    return flat


def alone(training: Training) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """One process with the whole batch and torch's own AdamW: weights, losses and norms."""
    model = registry.build(training.model).to(training.dtype)
    with torch.no_grad():
        for name, values in training.initial().items():
            model.get_parameter(name).copy_(values)
    return stepped_alone(training, model)


def stepped_alone(
    training: Training, model: nn.Module
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same with a model that has its initial weights."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(1, training.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        loss = gpt.loss(model, training.rows(step))
        loss.backward()
        clip = training.clip or torch.inf
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {n: p.detach() for n, p in model.named_parameters()}, losses, norms


def differences(training: Training, flat: Tensor, wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Relative L2 of the whole model, and of the tensor where it is largest."""
    found = training.units.layout.views(flat.double())
    away = {name: (found[name] - wanted[name].double()).norm().item() for name in wanted}
    size = {name: wanted[name].double().norm().item() for name in wanted}
    model = sum(x * x for x in away.values()) ** 0.5 / sum(x * x for x in size.values()) ** 0.5
    return model, max(away[name] / size[name] for name in wanted)
