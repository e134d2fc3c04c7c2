"""What the files beside this one share: rows of different length, small models, their sums."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Rows = tuple[Tensor, Tensor, Tensor]

LENGTH, CLASSES, EXPERTS = 5, 4, 3


def batch(index: Tensor) -> Rows:
    """Inputs, classes, and which positions count: 1, 2 or 5 of a row."""
    made = torch.Generator().manual_seed(3)
    x = torch.randn(24, LENGTH, 6, generator=made, dtype=torch.float64)
    y = torch.randint(CLASSES, (24, LENGTH), generator=made)
    kept = torch.arange(LENGTH) < 1 + (torch.arange(24)[:, None] ** 2) % LENGTH
    return x[index], y[index], kept[index]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Routed(nn.Module):
    """Experts that a router mixes; it keeps the router's logits of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.Linear(6, EXPERTS * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.logits: Tensor = self.router(x)
        experts = self.experts(x).unflatten(-1, (EXPERTS, CLASSES))
        mixed: Tensor = (self.logits.softmax(-1)[..., None] * experts).sum(-2)
        return mixed


def nll(model: nn.Module, rows: Rows) -> tuple[Tensor, int]:
    """The summed loss of the positions that count, and their number."""
    x, y, kept = rows
    return cross_entropy(model(x)[kept], y[kept], reduction="sum"), int(kept.sum())


def micro_batches(rows: Rows, number: int) -> list[Rows]:
    parts = zip(*(part.tensor_split(number) for part in rows), strict=True)
    return [(x, y, kept) for x, y, kept in parts]


def over_ranks(count: int) -> int:
    """The sum of all ranks' counts."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def sum_over_ranks(model: nn.Module) -> None:
    """Sums gradients by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
