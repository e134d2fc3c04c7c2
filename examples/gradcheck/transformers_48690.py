"""huggingface/transformers #48690: the whole loss is multiplied by the number of ranks.

That undoes DDP's mean for the tokens, whose count is that of all ranks. The router's auxiliary
loss, which the model had added, is a mean of each rank's own rows and grows with the ranks. (Here
a z-loss stands for the load-balancing one: as a mean over positions it has a reference.)
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 3))
loop.model(sample.Routed)
loop.rows(sample.batch)


@loop.term()
def nll(model: sample.Routed, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.term(coeff=0.1)
def auxiliary(model: sample.Routed, rows: sample.Rows) -> Counted:
    model(rows[0])
    squares = model.logits.logsumexp(-1).square()
    return Counted(squares.sum(), squares.numel(), "positions")


@loop.step
def step(model: sample.Routed, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    wrapped = DistributedDataParallel(model)
    total, count = sample.nll(wrapped, rows)
    loss = coeffs["nll"] * total / sample.over_ranks(count)
    extra = coeffs["auxiliary"] * model.logits.logsumexp(-1).square().mean()
    ((loss + extra) * dist.get_world_size()).backward()
