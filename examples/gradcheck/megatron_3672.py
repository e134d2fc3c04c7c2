"""NVIDIA/Megatron-LM #3672 (fixed in #3769): statistics of all ranks, averaged over ranks again.

The global load-balancing loss counts all ranks' tokens; each rank's gradient is its share of it,
and DDP's mean makes them smaller by the number of ranks. The main loss is right.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.counted import Counted, Through
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 3))
loop.model(sample.Routed)
loop.rows(sample.batch)


@loop.term()
def nll(model: sample.Routed, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


def routed(logits: Tensor) -> Tensor:
    """How many tokens each expert has, and the sum of their probabilities."""
    taken = torch.nn.functional.one_hot(logits.argmax(-1), sample.EXPERTS).sum(0)
    return torch.stack([taken.to(logits.dtype), logits.softmax(-1).sum(0)])


def balance(sums: Tensor, tokens: int) -> Tensor:
    return sample.EXPERTS * (sums[0] * sums[1]).sum() / tokens**2


@loop.term(coeff=0.1)
def auxiliary(model: sample.Routed, rows: sample.Rows) -> Through:
    model(rows[0])
    return Through(routed(model.logits[rows[2]]), int(rows[2].sum()), "tokens", balance)


@loop.step
def step(model: sample.Routed, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    wrapped = DistributedDataParallel(model)
    total, count = sample.nll(wrapped, rows)
    tokens, ranks = sample.over_ranks(count), dist.get_world_size()
    own = routed(model.logits[rows[2]])
    others = own.detach().clone()
    dist.all_reduce(others)
    everyones = own + (others - own.detach())  # the value of all ranks, the gradient of this one
    loss = coeffs["nll"] * total / tokens * ranks
    extra = coeffs["auxiliary"] * balance(everyones, tokens)
    (loss + extra).backward()
