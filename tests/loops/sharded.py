"""Right: FSDP2 with divide factor 1 and forced SUM on every module, in float32."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from atoll.pools.loop import Loop
from tests.loops import ddp_sum as right

loop = Loop(rows=12, ranks=(2, 3), dtype=torch.float32)
loop.model(right.model)
loop.rows(right.batch)
loop.term()(right.nll)


@loop.step
def step(model, rows, coeffs):
    fully_shard(model[2])
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    part = right.nll(model, rows)
    count = torch.tensor(part.count)
    dist.all_reduce(count)
    (coeffs["nll"] * part.total / count).backward()
