"""mlfoundations/open_clip #616 (and pytorch/pytorch #58005): the whole loss on every rank.

Features are gathered by a collective whose backward sums what all ranks send back. Each of them
computes the loss of all pairs, so every feature gets its gradient once from each rank. DDP's mean
hides it; where gradients are summed they are larger by the number of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from atoll.pools.counted import Through
from atoll.pools.loop import Loop
from examples.gradcheck import sample

ROWS = 13
loop = Loop(rows=ROWS, ranks=(2, 3))
loop.model(sample.net)


@loop.rows
def batch(index: Tensor) -> tuple[Tensor, Tensor]:
    return index, sample.batch(index)[0]


def pairs(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Features of both sides, [ROWS, 2, 4], at the places of these rows; else 0."""
    index, x = rows
    found = normalize(model(x[:, :2]), dim=-1)
    return torch.zeros(ROWS, *found.shape[1:]).index_put((index,), found)


def contrastive(features: Tensor, rows: int) -> Tensor:
    logits = 10.0 * features[:, 0] @ features[:, 1].T
    return cross_entropy(logits, torch.arange(rows))


@loop.term()
def clip(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Through:
    return Through(pairs(model, rows), len(rows[0]), "rows", contrastive)


class Gathered(torch.autograd.Function):
    """The sum over ranks; its gradient is summed over ranks, too."""

    @staticmethod
    def forward(_: Any, own: Tensor) -> Tensor:
        everyones = own.clone()
        dist.all_reduce(everyones)
        return everyones

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        everyones = gradients[0].clone()
        dist.all_reduce(everyones)
        return everyones


@loop.step
def step(model: nn.Module, rows: tuple[Tensor, Tensor], coeffs: dict[str, float]) -> None:
    features: Tensor = Gathered.apply(pairs(model, rows))
    loss = contrastive(features, ROWS)
    (coeffs["clip"] * loss).backward()
    sample.sum_over_ranks(model)
