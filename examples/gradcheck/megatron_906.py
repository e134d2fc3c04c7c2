"""NVIDIA/Megatron-LM #906 (and #673): times the context-parallel size, divided without it.

Two ranks share each sequence. The loss is scaled for a mean over all ranks, and the gradients'
buffer divides by the data-parallel ones: twice as much, whatever the number of ranks. (A rank's
rows stand for its part of the sequences.)
"""

import torch.distributed as dist
from torch import nn

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 4))
loop.model(sample.net)
loop.rows(sample.batch)

CONTEXT = 2


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    data = dist.get_world_size() // CONTEXT
    total, count = sample.nll(model, rows)
    mean = total / sample.over_ranks(count) * data
    (coeffs["nll"] * mean * CONTEXT).backward()
    sample.sum_over_ranks(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= data
