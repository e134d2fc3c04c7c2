"""ByteDance-Seed/VeOmni #184 (and #862): the norm for clipping counts replicated shards twice.

With HSDP a shard stands on two ranks. Squares that are summed over all ranks count it twice: the
norm is larger by the square root of two, and clipping sets in too early. Gradients are right.
"""

import torch
import torch.distributed as dist
from torch import nn

from atoll.pools.adapters import install
from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 4))
loop.model(sample.net)
loop.rows(sample.batch)

REPLICAS = 2


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (REPLICAS, dist.get_world_size() // REPLICAS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    install.sum_gradients(model)
    total, count = sample.nll(model, rows)
    (coeffs["nll"] * total / sample.over_ranks(count)).backward()
    shards = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr] # DTensors
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(squares)
    return {"clip_norm": float(squares.sqrt())}
