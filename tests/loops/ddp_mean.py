"""Wrong: the right loop without its hook, so DDP divides by the number of ranks once more."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.loop import Loop
from tests.loops import ddp_sum as right

loop = Loop(rows=12, ranks=(2, 3))
loop.model(right.model)
loop.rows(right.batch)
loop.term()(right.nll)
loop.term(coeff=0.1)(right.square)


@loop.step
def step(model, rows, coeffs):
    wrapped = DistributedDataParallel(model)
    loss: torch.Tensor = torch.zeros(())
    for name, term in (("nll", right.nll), ("square", right.square)):
        part = term(wrapped, rows)
        count = torch.tensor(part.count)
        dist.all_reduce(count)
        loss = loss + coeffs[name] * part.total / count
    loss.backward()
