"""Right: DDP with a SUM hook, and every term divided by the count of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop

loop = Loop(rows=12, ranks=(2, 3))
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(12, 5, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (12, 5), generator=GENERATOR)
KEPT = torch.arange(5) < 1 + (torch.arange(12)[:, None] ** 2) % 5  # rows of different length


@loop.model
def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


@loop.rows
def batch(index):
    return X[index], Y[index], KEPT[index]


@loop.term()
def nll(model, rows):
    x, y, kept = rows
    return Counted(
        cross_entropy(model(x)[kept], y[kept], reduction="sum"), int(kept.sum()), "tokens"
    )


@loop.term(coeff=0.1)
def square(model, rows):
    x = rows[0]
    return Counted(model(x).square().sum(), x.shape[0] * x.shape[1], "positions")


def sum_hook(_, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@loop.step
def step(model, rows, coeffs):
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, sum_hook)
    losses = {}
    for name, term in (("nll", nll), ("square", square)):
        part = term(wrapped, rows)
        count = torch.tensor(part.count)
        dist.all_reduce(count)
        losses[name] = coeffs[name] * part.total / count
    sum(losses.values()).backward()
    logged = torch.stack([loss.detach() for loss in losses.values()])
    dist.all_reduce(logged)
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"losses": dict(zip(losses, logged.tolist(), strict=True)), "clip_norm": norm}
