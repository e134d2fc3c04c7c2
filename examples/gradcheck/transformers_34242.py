"""huggingface/transformers #34242 (fixed in #34373): each rank divides by its own tokens.

DDP's mean of the ranks' means is not the mean of all tokens where ranks have different many.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    wrapped = DistributedDataParallel(model)
    total, count = sample.nll(wrapped, rows)
    (coeffs["nll"] * total / count).backward()
