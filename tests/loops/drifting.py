"""Wrong: gradients are summed, but each rank then adds something of its own to one tensor."""

import torch
import torch.distributed as dist

from atoll.pools.loop import Loop
from tests.loops import ddp_sum as right

loop = Loop(rows=12, ranks=(2,))
loop.model(right.model)
loop.rows(right.batch)
loop.term()(right.nll)


@loop.step
def step(model, rows, coeffs):
    part = right.nll(model, rows)
    count = torch.tensor(part.count)
    dist.all_reduce(count)
    (coeffs["nll"] * part.total / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    if dist.get_rank() == 1:
        bias = model[2].bias.grad
        bias[0] = torch.nextafter(bias[0], torch.tensor(torch.inf))
