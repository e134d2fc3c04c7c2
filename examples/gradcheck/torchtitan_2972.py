"""pytorch/torchtitan #2972: the raw sum goes backward, and only what is logged is divided.

The logged loss is right, the gradient too large by the number of tokens.
"""

import torch.distributed as dist
from torch import nn

from atoll.pools.adapters import install
from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 3))
loop.model(sample.net)
loop.rows(sample.batch)


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> dict[str, object]:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    install.sum_gradients(model)  # FSDP2 without its division
    total, count = sample.nll(model, rows)
    tokens = sample.over_ranks(count)
    (coeffs["nll"] * total).backward()
    logged = coeffs["nll"] * total.detach() / tokens
    dist.all_reduce(logged)
    return {"losses": {"nll": float(logged)}}
