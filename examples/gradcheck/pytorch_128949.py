"""pytorch/pytorch #128949: a parameter that nothing uses, and DDP that does not look for it.

Its bucket waits for a gradient that never comes, so nothing of it is reduced: every rank keeps
its own gradients, without an error in this step, and the replicas drift apart.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample


class Unused(nn.Module):
    """With a head that `forward` does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used = sample.net()
        self.unused = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


loop = Loop(rows=12, ranks=(2, 3))
loop.model(Unused)
loop.rows(sample.batch)


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    wrapped = DistributedDataParallel(model)
    total, count = sample.nll(wrapped, rows)
    (coeffs["nll"] * total / sample.over_ranks(count) * dist.get_world_size()).backward()
