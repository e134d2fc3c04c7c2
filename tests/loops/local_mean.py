"""Wrong: each rank's token mean, and DDP's mean of those."""

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
    nll, square = right.nll(wrapped, rows), right.square(wrapped, rows)
    loss = coeffs["nll"] * nll.total / nll.count + coeffs["square"] * square.total / square.count
    loss.backward()
    return {"loss": float(loss)}
