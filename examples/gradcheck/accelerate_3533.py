"""huggingface/accelerate #3533: accumulation is divided twice, by all tokens and by its steps.

The trainer divides by the tokens of all micro-batches already; `backward` divides once more.
"""

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 3))
loop.model(sample.net)
loop.rows(sample.batch)

STEPS = 4


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    wrapped = DistributedDataParallel(model)
    tokens = sample.over_ranks(int(rows[2].sum()))
    for number, micro in enumerate(sample.micro_batches(rows, STEPS), start=1):
        with wrapped.no_sync() if number < STEPS else nullcontext():
            total, _ = sample.nll(wrapped, micro)
            loss = coeffs["nll"] * total / tokens * dist.get_world_size()
            (loss / STEPS).backward()
