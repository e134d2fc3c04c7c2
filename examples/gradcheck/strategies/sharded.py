"""Sharded training in micro-batches: the owners' mean gradient is that of one process.

The GPT of a sharded run on its own engine, over gloo. Seven rows in two micro-batches are uneven
for every number of ranks, and with four one of them has a stand-in, which counts for nothing.
Adam's first moment without a memory is the mean gradient, which is what the owners are asked for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.clock import SystemClock
from atoll.collectives import torch_dist
from atoll.collectives.torch_dist import TorchRanks
from atoll.models import gpt, init, registry
from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from atoll.strategies.sharded import micro_batches
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step
from atoll.strategies.sharded.units import Units
from examples.gradcheck.strategies import run

BLOCK, MICRO_BATCHES = 8, 2
MODEL: dict[str, Any] = {
    "architecture": "gpt",
    **{"vocab": 40, "block": BLOCK, "layers": 2, "heads": 2, "width": 8, "tied": True},
}
RULE = AdamW(beta1=0.0, weight_decay=0.0)
loop = Loop(rows=7, ranks=(2, 3, 4))


@loop.model
def model() -> nn.Module:
    made = registry.build(MODEL).double()
    with torch.no_grad():
        for name, values in init.initial_weights(registry.layout(MODEL), seed=1):
            made.get_parameter(name).copy_(values)
    return made


@loop.rows
def batch(index: Tensor) -> Tensor:
    rows = torch.randint(40, (7, BLOCK + 1), generator=torch.Generator().manual_seed(5))
    return rows[index]


@loop.term()
def nll(model: nn.Module, rows: Tensor) -> Counted:
    tokens = len(rows) * BLOCK
    return Counted(gpt.loss(model, rows) * tokens, tokens, "tokens")


@loop.step
def step(model: nn.Module, rows: Tensor, coeffs: dict[str, float]) -> dict[str, object]:
    units = Units.of_model(registry.layout(MODEL))
    shard = Shard(units, rank=dist.get_rank(), size=dist.get_world_size(), dtype=torch.float64)
    weights = dict(model.named_parameters())
    for spec in units.layout.tensors:
        shard.fill("weights", spec.offset, weights[spec.name].detach().reshape(-1))
    ranks = TorchRanks(torch_dist.gloo_group())
    engine = Engine(registry.hollow(MODEL), shard, ranks, group=1, clock=SystemClock())
    cut = micro_batches.of(len(rows), rank=0, size=1, count=MICRO_BATCHES)
    own = [(rows[m.rows.start : m.rows.stop], m.num_rows * BLOCK) for m in cut]
    made = Step(engine, RULE, clip=0.0).train(
        1, own, lambda module, some: coeffs["nll"] * gpt.loss(module, some), lr=0.0
    )
    ranks.close()
    run.leave(model, _whole(shard), units.layout)
    return {
        "counts": {"nll": made.tokens},
        "loss": made.loss_sum / made.tokens,
        "clip_norm": made.norm,
    }


def _whole(shard: Shard) -> Tensor:
    """The first moments of all owners; those of others are zero here."""
    flat = torch.zeros(shard.units.layout.size)
    for unit, span in enumerate(shard.owned):
        span.of(flat).copy_(shard.of(unit, "first_moments"))
    dist.all_reduce(flat)
    return flat
