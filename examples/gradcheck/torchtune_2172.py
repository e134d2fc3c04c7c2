"""pytorch/torchtune #2172: a sum over all ranks' tokens, under FSDP2's mean over ranks.

The loss curve looks the same, the gradient's norm is smaller by the number of ranks.
"""

from torch import nn

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
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    total, count = sample.nll(model, rows)
    (coeffs["nll"] * total / sample.over_ranks(count)).backward()
